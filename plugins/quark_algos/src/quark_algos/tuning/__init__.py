"""Block-wise tuning of codes, scales and norms by the output of a block."""
