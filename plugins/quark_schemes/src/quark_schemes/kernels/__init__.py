"""Device code of number formats, as Triton functions.

A kernel of `quark.numbers.kernels` calls the device code of the format to which it quantizes.
"""
