"""Checks of number formats: rounding, codes, scales, whole tensors, algorithms, and accepted specs."""

PARTS = ("rounding", "codes", "tensors", "algorithms", "specs")
"""The modules with these checks."""
