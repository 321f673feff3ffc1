"""Packages for models: `layers` has the layers that quantize, `plan` decides what is quantized, and `hf` uses
transformers."""
