"""The exporter ``compressed_tensors``: checkpoints as llm-compressor writes them."""
