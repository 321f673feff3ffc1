"""Mappings of equalization: a smooth layer and its balance layers.

How they are derived, resolved and folded.
"""
