"""Checks of templates."""
