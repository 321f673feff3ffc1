"""From a spec's names to objects: number format, observer, quantizer. The registries are asked; nothing is known here by name."""

from __future__ import annotations

from functools import lru_cache

import torch

from quark.config.enums import Dtype
from quark.config.layer import TensorSpec, levels
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError, UnsupportedError
from quark.plugins import Catalog, documented_object, formats, observers
from quark.plugins.catalog import catalog
from quark.quantizers.granularity import PerGroup, PerTensor, granularity_of
from quark.quantizers.number_format import NumberFormat
from quark.quantizers.observer import Observer
from quark.quantizers.progressive import ProgressiveQuantizer
from quark.quantizers.single_level import SingleLevelQuantizer
from quark.quantizers.tensor_quantizer import TensorQuantizer
from quark.quantizers.two_level import TwoLevelQuantizer

_EXAMPLE = 32
"""Side of a matrix that every format can pack."""


def number_format(dtype: Dtype | str) -> NumberFormat:
    """The number format of that name.

    Raises:
        UnknownNameError: No installed plugin provides it.
    """
    found: NumberFormat = formats().load_format(Dtype(dtype).name if isinstance(dtype, str) else dtype.name)
    return found


def packed_dtype(dtype: Dtype | str) -> torch.dtype:
    """In which torch dtype a checkpoint holds codes of that format; raises as `number_format`."""
    found = number_format(dtype)
    codes = torch.empty(_EXAMPLE, _EXAMPLE, dtype=found.storage_dtype, device="meta")
    return found.pack(codes, PerGroup(_EXAMPLE), "order").dtype


def canonicalize(spec: TensorSpec) -> tuple[QTensorConfig, ...]:
    """The levels that a spec means, each spelled out by its format."""
    given = (spec,) if isinstance(spec, QTensorConfig) else spec
    return tuple(stage for one in given for stage in levels(number_format(one.dtype).canonicalize(one)))


def format_of(spec: QTensorConfig) -> NumberFormat:
    """The number format of a canonical spec, with the spec's rounding."""
    return number_format(spec.dtype).for_spec(spec)


def observer_class(spec: QTensorConfig) -> type[Observer]:
    """The observer of a spec: the class given, or the registered one of that name or class name; the format's own where none is named.

    Raises:
        UnknownNameError: No installed plugin provides it.
        ConfigError: It is no observer.
    """
    named = spec.observer_cls if spec.observer_cls is not None else number_format(spec.dtype).default_observer
    found = _registered(named) if isinstance(named, str) else named
    if not (isinstance(found, type) and issubclass(found, Observer)):
        raise ConfigError(
            f"observer_cls={named!r} of {spec.dtype.name} is no observer: give a subclass of quark.quantizers.Observer, or its name"
        )
    return found


def _registered(name: str) -> object:
    """The observer registered under a name or a class name, or else what plugins document under it."""
    record = next((r for r in observers() if name in (r.class_name, r.name, *r.aliases)), None)
    return documented_object(name) if record is None else observers().load_observer(record.name)


def quantizer_for(spec: TensorSpec, *, activation: bool) -> TensorQuantizer:
    """The quantizer of a tensor.

    Args:
        spec: One stage, or several.
        activation: Whether the tensor is an activation: a dynamic scale per channel then means one per token.

    Raises:
        ConfigError: The spec is incomplete.
        UnknownNameError: A format or an observer is not installed.
        UnsupportedError: More than two levels.
    """
    return _quantizer(spec if isinstance(spec, QTensorConfig) else tuple(spec), activation, catalog())


@lru_cache(maxsize=1024)
def _quantizer(spec: TensorSpec, activation: bool, plugins: Catalog) -> TensorQuantizer:
    """Quantizers are values: layers with equal specs share one, as long as ``plugins`` are those that names are looked up in."""
    found = canonicalize(spec)
    if len(found) > 2:
        names = " → ".join(s.dtype.name for s in found)
        raise UnsupportedError(f"{len(found)} stages ({names}) cannot be carried out: a tensor has one or two")
    first, *rest = (_stage(stage, activation) for stage in found)
    if not rest:
        return first
    return TwoLevelQuantizer(first, rest[0]) if found[1].is_scale_quant else ProgressiveQuantizer(first, rest[0])


def _stage(spec: QTensorConfig, activation: bool) -> SingleLevelQuantizer:
    found = format_of(spec)
    granularity = PerTensor() if found.is_cast else granularity_of(spec, activation=activation)
    # A copy: quantizers outlive the configurations that they are made from, which may be changed.
    return SingleLevelQuantizer(spec.copied(), granularity, found, observer_class(spec))
