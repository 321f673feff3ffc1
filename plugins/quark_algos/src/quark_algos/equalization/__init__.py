"""Smoothing: scales that move between an operation and what reads it.

Which modules they move through, how, and which scales are best.
"""
