"""Block-wise tuning: codes, scales and norms of a rounded block are changed so that its output error
decreases.

Start to read at `block.TuneBlock`.
"""
