"""The scheme acme_nf3_g64. This file does not import torch, because commands that list schemes import it."""

from __future__ import annotations

from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig

__all__ = ["acme_nf3_g64"]


def acme_nf3_g64(group_size: int = 64) -> QLayerConfig:
    """Return a configuration that quantizes weights to acme_nf3. Each group of input channels has a float32
    scale.

    Args:
        group_size: Number of elements that share a scale. It must divide the number of input channels. With
            64, an element needs 3.5 bits.
    """
    weight = QTensorConfig(
        dtype="acme_nf3",
        observer_cls="AcmeRmsObserver",
        is_dynamic=False,
        qscheme="per_group",
        ch_axis=-1,
        group_size=group_size,
        symmetric=True,
        scale_type="float32",
    )
    return QLayerConfig(weight=weight)
