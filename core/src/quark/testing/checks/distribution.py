"""Checks of distributions."""
