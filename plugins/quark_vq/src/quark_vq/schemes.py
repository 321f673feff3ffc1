"""Schemes that quantize only weights. There is one scale for each output channel, or for each group of
columns.
"""

from __future__ import annotations

from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig

__all__ = ["vq2", "vq2_g64", "vq3", "vq3_g64"]

_GROUP = 64
"""Number of columns in a group. The scale of a group is the largest magnitude in it.

With the root mean square as the scale, the few large weights of a group would be far from all entries.
"""


def vq2() -> QLayerConfig:
    """Return a configuration that quantizes weights with 2-bit codebooks and a scale for each output
    channel.
    """
    return _per_channel("vq2")


def vq3() -> QLayerConfig:
    """Return a configuration that quantizes weights with 3-bit codebooks and a scale for each output
    channel.
    """
    return _per_channel("vq3")


def vq2_g64() -> QLayerConfig:
    """Return a configuration that quantizes weights with 2-bit codebooks and a scale for each group of 64
    columns.
    """
    return _per_group("vq2")


def vq3_g64() -> QLayerConfig:
    """Return a configuration that quantizes weights with 3-bit codebooks and a scale for each group of 64
    columns.
    """
    return _per_group("vq3")


def _per_channel(dtype: str) -> QLayerConfig:
    spec = QTensorConfig(
        dtype=dtype, qscheme="per_channel", ch_axis=0, symmetric=True, is_dynamic=False, observer_cls="RMSObserver", scale_format="bfloat16"
    )
    return QLayerConfig(weight=spec)


def _per_group(dtype: str) -> QLayerConfig:
    spec = QTensorConfig(
        dtype=dtype,
        qscheme="per_group",
        ch_axis=-1,
        group_size=_GROUP,
        symmetric=True,
        is_dynamic=False,
        observer_cls="MinMaxObserver",
        scale_format="bfloat16",
    )
    return QLayerConfig(weight=spec)
