"""Block floating point schemes: BFP16, and shared microexponents."""

from __future__ import annotations

from quark.config.layer import QLayerConfig
from quark_schemes.specs.block_float import BFP16Spec, MX6Spec, MX9Spec
from quark_schemes.specs.options import SingleLevelSpec

__all__ = ["bfp16", "mx6", "mx9"]


def _both(helper: SingleLevelSpec) -> QLayerConfig:
    spec = helper.to_quantization_spec()
    return QLayerConfig(weight=spec, input_tensors=spec)


def bfp16() -> QLayerConfig:
    """Return a configuration of BFP16 weights and activations, an exponent for eight values."""
    return _both(BFP16Spec(ch_axis=-1))


def mx6(block_size: int = 16) -> QLayerConfig:
    """Return a configuration of MX6 weights and activations.

    Args:
        block_size: Values that share an exponent: 16 by the format's definition and since 0.13; 32 was the
            default before.
    """
    return _both(MX6Spec(ch_axis=-1, block_size=block_size))


def mx9(block_size: int = 16) -> QLayerConfig:
    """Return a configuration of MX9 weights and activations.

    Args:
        block_size: Values that share an exponent, as for `mx6`.
    """
    return _both(MX9Spec(ch_axis=-1, block_size=block_size))
