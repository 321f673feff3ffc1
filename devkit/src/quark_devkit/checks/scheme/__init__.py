"""Checks of schemes: their configuration, tensors quantized by it, and a model quantized, exported and loaded."""

PARTS = ("configuration", "tensors", "models")
"""The modules that hold them."""
