"""Names of functions: which spec a function of the domain ``quark`` is for."""

from __future__ import annotations

import json
import re

from quark.config.layer import levels
from quark.config.tensor import QTensorConfig
from quark.numbers import TensorQuantizer

__all__ = ["described", "name_of"]


def name_of(quantizer: TensorQuantizer) -> str:
    """Return a name for the spec of a quantizer, such as ``fp4_per_group32_e8m0``; `described` tells those of equal names apart."""
    name = "_then_".join(_name(level) for level in levels(quantizer.spec))
    return re.sub(r"\W", "_", name)


def described(quantizer: TensorQuantizer) -> str:
    """Return the spec of a quantizer as JSON, and which elements share a scale."""
    return f"{json.dumps([level.to_dict() for level in levels(quantizer.spec)])}, {quantizer.granularity}"


def _name(spec: QTensorConfig) -> str:
    """Return the fields on which the arithmetic of an activation depends, those that are at their usual value left out."""
    size = spec.group_size or ""
    parts = [spec.dtype.name, "" if spec.qscheme is None else f"{spec.qscheme.value}{size}"]
    parts += ["" if spec.scale_format in (None, "float32") else str(spec.scale_format), spec.scale_calculation_mode or ""]
    parts += ["" if spec.scale_type is None or spec.scale_type.value.startswith("float") else spec.scale_type.value]
    parts += ["" if spec.round_method is None or spec.round_method.name == "half_even" else spec.round_method.name]
    return "_".join(filter(None, parts))
