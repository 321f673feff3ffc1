"""Rotations. This package has Hadamard matrices and fast products with them, and it folds rotations into the
weights of a model.
"""
