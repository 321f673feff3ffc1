"""Modules that AMD Quark's example scripts import besides its library, and its script ``quantize_quark``."""
