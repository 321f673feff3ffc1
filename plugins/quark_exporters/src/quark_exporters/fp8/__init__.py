"""The exporter ``fp8``: FP8 weights as DeepSeek-V3 stores them."""
