"""Checks of schemes: their configuration, tensors, and a model quantized, exported and loaded."""

PARTS = ("configuration", "tensors", "models")
"""The modules with these checks."""
