"""Checks of schemes."""
