"""Example specs: tensor configurations that a number format or an observer accepts, found by trial."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import product
from typing import Any

import attrs

from quark.config.enums import Dtype
from quark.config.layer import levels
from quark.config.tensor import QTensorConfig
from quark.errors import QuarkError
from quark.numbers import TensorQuantizer, quantizer_for
from quark.plugins import Catalog, formats, observers, schemes
from quark.plugins.catalog import catalog
from quark_devkit.check import assume

__all__ = ["SHAPE", "Example", "example_specs", "examples", "int8_spec", "odd_specs", "registered_formats"]

SHAPE = (64, 64)
"""Shape of a tensor; the groups and blocks of every example spec divide it."""
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
    """An accepted spec and its quantizer.

    Attributes:
        spec: The spec as written.
        quantizer: Quantizer of a weight with that spec.
    """

    spec: QTensorConfig
    quantizer: TensorQuantizer

    def __str__(self) -> str:
        level = self.quantizer.stored_level
        zero = " asymmetric" if level.spec.symmetric is False else ""
        return f"{self.spec.dtype.name}{zero}" if level.is_float else f"{self.spec.dtype.name} {level.granularity}{zero}"


def example_specs(dtype: str) -> Iterator[QTensorConfig]:
    """Yield specs of a number format to try: specs of every granularity, with and without zero points.

    The first specs come from registered schemes, which set further fields that the format needs. The last
    spec is a spec of scales, for formats that are only for scales.
    """
    yield from (spec for spec in _specs_of_schemes(*_state()) if spec.dtype is Dtype(dtype))
    yield from _tried({"dtype": dtype})
    for granularity, symmetric, scale in product(_GRANULARITIES, (True, False, None), _SCALES):
        yield from _tried({"dtype": dtype, **granularity, **scale, "symmetric": symmetric, "is_dynamic": False})
    yield from _tried({"dtype": dtype, "mx_element_dtype": Dtype.int8, "ch_axis": -1, "group_size": 32})
    yield from _tried({"dtype": dtype, "qscheme": "per_tensor", "symmetric": True, "is_dynamic": False, "is_scale_quant": True})


def examples(dtypes: Iterable[str], observer_cls: str | None = None) -> tuple[Example, ...]:
    """Return the accepted specs of `example_specs` with their quantizers, one for each granularity and
    symmetry.

    Args:
        dtypes: Names of number formats.
        observer_cls: Class name of the observer; None for the format's observer.
    """
    return _examples(tuple(dtypes), observer_cls, *_state())


def odd_specs(dtypes: Iterable[str]) -> Iterator[QTensorConfig]:
    """Yield specs with missing, contradictory or unknown fields, which few formats or observers accept."""
    odd: tuple[dict[str, Any], ...] = (
        {},
        {"is_dynamic": True},
        {"qscheme": "per_tensor"},
        {"qscheme": "per_tensor", "symmetric": False, "is_dynamic": False},
        {"qscheme": "per_channel", "ch_axis": 5, "symmetric": True, "is_dynamic": False},
        {"qscheme": "per_group", "ch_axis": 0, "group_size": 3, "symmetric": True},
        {"qscheme": "per_group", "ch_axis": -1, "group_size": -1, "symmetric": None, "is_dynamic": True},
        {"qscheme": "per_block", "block_size": (7, 3), "symmetric": True},
        {"qscheme": "per_tensor", "symmetric": True, "is_dynamic": False, "scale_format": "no_such_format"},
        {"qscheme": "per_tensor", "symmetric": True, "is_dynamic": False, "scale_calculation_mode": "no_such_mode"},
        {"qscheme": "per_tensor", "symmetric": True, "is_dynamic": False, "is_scale_quant": True},
        {"qscheme": "per_tensor", "symmetric": True, "is_dynamic": False, "round_method": "floor"},
        {"qscheme": "per_tensor", "symmetric": False, "is_dynamic": False, "zero_point_type": "float32"},
        {"qscheme": "per_tensor", "symmetric": True, "is_dynamic": False, "scale_type": "float16"},
        {"qscheme": "per_tensor", "symmetric": True, "is_dynamic": False, "observer_options": {"percentile": "many"}},
        {"qscheme": "per_tensor", "symmetric": True, "is_dynamic": False, "observer_options": {"percentile": None}},
        {"mx_element_dtype": Dtype.int8, "observer_cls": "NoSuchObserver"},
    )
    for dtype, fields in product(dtypes, odd):
        yield from _tried({"dtype": dtype, **fields})


def int8_spec(*, is_dynamic: bool = False) -> QTensorConfig:
    """Return a symmetric spec of 8-bit integers with one scale for a tensor.

    Raises:
        NotApplicableError: No installed distribution has that format.
    """
    assume(Dtype.int8.name in registered_formats(), "no number format of 8-bit integers is installed")
    return QTensorConfig(dtype=Dtype.int8, qscheme="per_tensor", symmetric=True, is_dynamic=is_dynamic)


def registered_formats() -> list[str]:
    """Return the names of all registered number formats."""
    return formats().names()


def _state() -> tuple[Catalog, tuple[object, ...]]:
    """Return the plugins of this process, and a value that changes with their records."""
    return catalog(), (formats().revision, observers().revision, schemes().revision)


@lru_cache(maxsize=256)
def _examples(dtypes: tuple[str, ...], observer_cls: str | None, plugins: Catalog, revision: object) -> tuple[Example, ...]:
    if observer_cls is not None:
        others = (example.spec.set(observer_cls=observer_cls) for example in _examples(dtypes, None, plugins, revision))
        return tuple(Example(spec, quantizer) for spec in others if (quantizer := _accepted(spec)) is not None)
    found: dict[tuple[object, ...], Example] = {}
    for dtype in dtypes:
        for spec in example_specs(dtype):
            if (quantizer := _accepted(spec)) is not None:
                level = quantizer.stored_level
                key = (dtype, level.format.name, level.granularity, level.spec.symmetric is False, spec.is_scale_quant)
                found.setdefault(key, Example(spec, quantizer))
    used_for_elements = {example.spec.dtype for example in found.values() if not example.spec.is_scale_quant}
    return tuple(e for e in found.values() if not (e.spec.is_scale_quant and e.spec.dtype in used_for_elements))


def _accepted(spec: QTensorConfig) -> TensorQuantizer | None:
    try:
        quantizer = quantizer_for(spec, activation=False)
        return quantizer if quantizer.shape_error(SHAPE) is None else None
    except Exception:  # any exception: the plugin's own checks report it
        return None


def _tried(fields: dict[str, Any]) -> Iterator[QTensorConfig]:
    try:
        yield QTensorConfig(**fields)
    except (QuarkError, ValueError, TypeError):
        return


@lru_cache(maxsize=32)
def _specs_of_schemes(plugins: Catalog, revision: object) -> tuple[QTensorConfig, ...]:
    specs: list[QTensorConfig] = []
    for name in schemes().names():
        try:
            layer = schemes().load_config(name)()
            written = [level for spec in (layer.weight, layer.input_tensors) for level in levels(spec) if not level.is_scale_quant]
        except Exception:  # any exception: the checks of schemes report a scheme that cannot be built
            continue
        specs += (level.set(is_dynamic=False) if level.is_dynamic else level for level in written)
    return tuple(specs)
