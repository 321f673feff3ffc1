"""Imports of AMD Quark's example scripts besides its library, and its script ``quantize_quark``."""
