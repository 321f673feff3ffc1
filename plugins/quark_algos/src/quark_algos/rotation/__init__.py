"""Rotations: Hadamard matrices, fast products with them, and folding them into the weights of a model."""
