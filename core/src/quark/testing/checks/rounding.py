"""Checks of roundings."""
