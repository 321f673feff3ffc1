"""The ``*Spec`` helpers of AMD Quark's public API, with one file for each family of formats.

Each helper builds a `QTensorConfig` from a few settings. This package does not import torch.
"""
