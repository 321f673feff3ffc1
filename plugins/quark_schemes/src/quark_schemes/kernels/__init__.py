"""Device code of number formats, as Triton functions.

The kernels of `quark.numbers.kernels` call the device code of the format that they quantize to.
"""
