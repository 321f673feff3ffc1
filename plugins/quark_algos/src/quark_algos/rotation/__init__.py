"""Rotations: Hadamard matrices of many orders, fast products with them, and folding them into the weights of a model."""
