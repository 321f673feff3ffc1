"""The exporter ``compressed_tensors``, which writes checkpoints in the layout that llm-compressor writes."""
