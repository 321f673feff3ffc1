"""Checks of layer types."""
