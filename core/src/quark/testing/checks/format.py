"""Checks of formats."""
