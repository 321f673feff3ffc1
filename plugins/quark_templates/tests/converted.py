"""The tensors of a checkpoint after the weight converters of a template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from quark.models.hf.converted_tensors import find_conversions


def converted(tensors: Mapping[str, Tensor], converters: Sequence[Any] | None) -> dict[str, Tensor]:
    """The results of the converters, and the tensors that none of them matches."""
    conversions = find_conversions(tensors, converters or ())
    used = {name for conversion in conversions for name in conversion.sources}
    kept = {name: tensor for name, tensor in tensors.items() if name not in used}
    return kept | {name: tensor for conversion in conversions for name, tensor in conversion.make(tensors).items()}
