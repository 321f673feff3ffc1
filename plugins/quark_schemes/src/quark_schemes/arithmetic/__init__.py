"""Arithmetic of the formats as pure functions on tensors: small floats, shared exponents, packed bits."""
