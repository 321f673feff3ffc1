"""Models as quantization sees them: `layers` that quantize, the `plan` of a model, and `hf` for all that is known of transformers."""
