"""Mappings of equalization. A mapping consists of a smooth layer and its balance layers, which read the
output of the smooth layer.

This package derives mappings from an architecture, finds the layers of a mapping in a block, and folds scales
into these layers.
"""
