"""Models as quantization sees them: `layers` that quantize, the `plan`, and `hf` for transformers."""
