"""Mappings of equalization: a smooth layer and its balance layers.

The modules derive, resolve and fold them.
"""
