"""MXFP4 checkpoints as gpt-oss stores them: read as sources."""
