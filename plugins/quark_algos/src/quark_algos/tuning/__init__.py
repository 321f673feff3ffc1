"""Block-wise tuning: codes, scales and norms of a rounded block are changed so that the block's output error
decreases.

`block.TuneBlock` is the main class.
"""
