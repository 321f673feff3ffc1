"""Equalization: scales move from the outputs of a smooth layer into the weights of its balance layers.

The balance layers are the layers that read the output of the smooth layer. The modules of this package choose
the mappings from smooth to balance layers, search the scales, and fold the scales into the weights.
"""
