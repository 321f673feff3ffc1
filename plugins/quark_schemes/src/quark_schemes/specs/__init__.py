"""The ``*Spec`` helpers of AMD Quark's public API, one file for each family of formats.

Each helper builds a `QTensorConfig` from the few settings that vary. This package imports no torch.
"""
