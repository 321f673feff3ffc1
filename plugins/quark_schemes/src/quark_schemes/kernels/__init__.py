"""Device code of number formats, as Triton functions.

Formats give it to the kernels of `quark.numbers.kernels`.
"""
