"""The arithmetic of number formats as Triton functions: the device code that formats give to the kernels of `quark.numbers.kernels`."""
