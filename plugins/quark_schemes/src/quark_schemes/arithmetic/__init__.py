"""The arithmetic of number formats, as pure functions on tensors.

The functions compute small floats, shared exponents and packed bits.
"""
