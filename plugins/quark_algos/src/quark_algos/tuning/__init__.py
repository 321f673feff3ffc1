"""Block-wise tuning: codes, scales and norms of a rounded block by the error of the block's output.

`block.TuneBlock` is where to start.
"""
