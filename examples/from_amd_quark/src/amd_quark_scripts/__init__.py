"""Modules that AMD Quark's example scripts import in addition to AMD Quark's library. One of them is the
script ``quantize_quark``."""
