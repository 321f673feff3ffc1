"""Observers, one small file for each family."""
