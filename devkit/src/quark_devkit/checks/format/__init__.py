"""Checks of number formats: rounding, codes, scales, whole tensors, algorithms, and what specs they accept."""

PARTS = ("rounding", "codes", "tensors", "algorithms", "specs")
"""The modules that hold them."""
