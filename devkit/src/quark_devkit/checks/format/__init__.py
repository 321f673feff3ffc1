"""Checks of number formats: rounding, vectors, codes, scales, tensors, algorithms, accepted specs."""

PARTS = ("rounding", "vectors", "codes", "tensors", "algorithms", "specs")
"""The modules with these checks."""
