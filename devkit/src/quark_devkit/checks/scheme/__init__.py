"""Checks of schemes: the configuration, single tensors, and a model that is quantized, exported and
loaded."""

PARTS = ("configuration", "tensors", "models")
"""The modules with these checks."""
