"""Example specs: the configurations of a tensor that a number format or an observer accepts, found by trying."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import attrs

from quark.config.enums import Dtype
from quark.config.layer import levels
from quark.config.tensor import QTensorConfig
from quark.errors import QuarkError
from quark.plugins import formats, schemes
from quark.quantizers import TensorQuantizer, quantizer_for

__all__ = ["SHAPE", "Example", "example_specs", "examples", "registered_formats"]

SHAPE = (64, 64)
"""Shape of a tensor that every example spec divides."""
_GRANULARITIES: tuple[dict[str, Any], ...] = (
    {"qscheme": "per_tensor"},
    {"qscheme": "per_channel", "ch_axis": 0},
    {"qscheme": "per_group", "ch_axis": -1, "group_size": 32},
    {"qscheme": "per_group", "ch_axis": -1, "group_size": 16},
    {"qscheme": "per_block", "block_size": (32, 32)},
)
_SCALES: tuple[dict[str, Any], ...] = ({}, {"scale_format": "e8m0", "scale_calculation_mode": "even"}, {"scale_type": "float32"})


@attrs.frozen(eq=False)
class Example:
    """A spec that is accepted, and its quantizer.

    Attributes:
        spec: As written.
        quantizer: Of a weight with that spec.
    """

    spec: QTensorConfig
    quantizer: TensorQuantizer

    def __str__(self) -> str:
        size = self.spec.group_size or self.spec.block_size or ""
        return f"{self.spec.dtype.name} {self.spec.qscheme.name if self.spec.qscheme else ''} {size} symmetric={self.spec.symmetric}"


def example_specs(dtype: str, observer_cls: str | None = None) -> Iterator[QTensorConfig]:
    """Yield specs of a number format to try, of every granularity, with and without zero points; not all of them are valid.

    The first ones are those of registered schemes, whose authors know which further fields the format needs.
    """
    for spec in _specs_of_schemes(dtype):
        yield spec if observer_cls is None else attrs.evolve(spec, observer_cls=observer_cls)
    for granularity, symmetric, scale in product(_GRANULARITIES, (True, False, None), _SCALES):
        fields = {**granularity, **scale, "symmetric": symmetric, "is_dynamic": False}
        try:
            yield QTensorConfig(dtype=dtype, observer_cls=observer_cls, **fields)
        except (QuarkError, ValueError, TypeError):
            continue


def examples(dtypes: Iterable[str], observer_cls: str | None = None) -> list[Example]:
    """Return the valid ones of `example_specs` with their quantizers, one of each granularity and symmetry; none of formats without scales.

    Args:
        dtypes: Names of number formats.
        observer_cls: Class name of the observer; None for that of the format.
    """
    found: dict[tuple[object, ...], Example] = {}
    for dtype in dtypes:
        for spec in example_specs(dtype, observer_cls):
            key = (dtype, spec.qscheme, spec.group_size, spec.block_size, spec.symmetric)
            if key in found:
                continue
            try:
                quantizer = quantizer_for(spec, activation=False)
                refused = quantizer.shape_error(SHAPE)
            except QuarkError:
                continue
            if refused is None and len(quantizer.levels) == 1 and not quantizer.is_float:
                found[key] = Example(spec, quantizer)
    return list(found.values())


def _specs_of_schemes(dtype: str) -> Iterator[QTensorConfig]:
    for name in schemes().names():
        try:
            layer = schemes().load_config(name)()
        except Exception:
            continue
        for spec in (layer.weight, layer.input_tensors):
            for level in levels(spec) if spec is not None else ():
                if level.dtype is Dtype(dtype) and not level.is_scale_quant:
                    yield attrs.evolve(level, is_dynamic=False) if level.is_dynamic else level


def registered_formats() -> list[str]:
    """Names of all registered number formats."""
    return formats().names()
