"""LQER: a low-rank product is computed beside each layer. It approximates the rounding error of the
weight.
"""
