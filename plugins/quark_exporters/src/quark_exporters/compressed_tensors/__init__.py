"""The exporter ``compressed_tensors``, which writes checkpoints in the layout of llm-compressor."""
