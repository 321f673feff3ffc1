"""Equalization: scales that move between a smooth layer and its balance layers.

The modules find the mappings, search the scales and fold them.
"""
