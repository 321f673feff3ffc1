"""How transformers' loader of Quark checkpoints names tensors inside a model.

Source: ``transformers.quantizers.quantizer_quark``.
"""

from __future__ import annotations

from functools import cache

__all__ = ["is_stored_beside_weight"]


@cache
def is_stored_beside_weight(suffix: str) -> bool:
    """Return whether the loader looks for a stored scale beside the weight, under its name in the checkpoint, not in a submodule.

    transformers looks there for what belongs to second levels; up to 5.19 its loader renamed those names too.
    """
    if not suffix.endswith("_2"):
        return False
    from transformers.quantizers import quantizer_quark  # only where a checkpoint of two levels is read, which transformers does anyway

    return hasattr(quantizer_quark, "CHECKPOINT_KEYS")
