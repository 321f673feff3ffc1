"""Equalization: scales that move between a smooth layer and its balance layers.

Which modules they move through, how, and which scales are best.
"""
