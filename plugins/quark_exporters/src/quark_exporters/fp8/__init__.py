"""FP8 checkpoints as DeepSeek, Qwen, Mistral and FBGEMM store them: read as sources."""
