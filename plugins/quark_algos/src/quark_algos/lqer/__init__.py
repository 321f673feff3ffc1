"""LQER: a low-rank product is added to the output of each layer. The product approximates the rounding error
of the weight.
"""
