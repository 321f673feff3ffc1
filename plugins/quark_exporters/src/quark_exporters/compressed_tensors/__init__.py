"""Checkpoints of compressed-tensors, as llm-compressor writes them: read as sources."""
