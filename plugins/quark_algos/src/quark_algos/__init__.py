"""The quantization algorithms of quark, and their configuration classes."""
