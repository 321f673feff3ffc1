"""Mappings of equalization. A mapping is a smooth layer with its balance layers.

The modules derive mappings from an architecture, find their modules in a block, and fold scales into them.
"""
