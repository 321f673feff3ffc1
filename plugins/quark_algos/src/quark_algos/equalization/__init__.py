"""Equalization: moves scale from the outputs of a smooth layer to the weights of its balance layers.

The modules choose the mappings, search the scales and fold the scales into weights.
"""
