"""Quantization algorithms of quark. This version brings their configuration classes."""
