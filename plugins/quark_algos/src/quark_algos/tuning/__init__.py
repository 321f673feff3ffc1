"""Block-wise tuning: tune codes, scales and norms of a rounded block by its output error.

Start reading at `block.TuneBlock`.
"""
