"""Checks of number formats: rounding, codes, scales, whole tensors, and what specs they accept."""

PARTS = ("rounding", "codes", "tensors", "specs")
"""The modules that hold them."""
