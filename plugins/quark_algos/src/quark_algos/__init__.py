"""Quantization algorithms of quark and their configuration classes."""
