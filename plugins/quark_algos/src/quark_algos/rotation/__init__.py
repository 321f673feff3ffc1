"""Rotations: Hadamard matrices, fast products with these matrices, and their folding into a model's
weights.
"""
