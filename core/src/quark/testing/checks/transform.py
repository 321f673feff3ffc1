"""Checks of transforms."""
