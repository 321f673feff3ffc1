"""The scheme acme_nf3_g64. No torch here: listings call this function."""

from __future__ import annotations

from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig

__all__ = ["acme_nf3_g64"]


def acme_nf3_g64(group_size: int = 64) -> QLayerConfig:
    """Return a configuration of weights in acme_nf3 along the input, with a float32 scale for each group.

    Args:
        group_size: Number of elements that share a scale. It must divide the number of inputs. With 64, a
            weight takes 3.5 bits.
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
