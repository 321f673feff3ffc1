"""Functions that build number formats, observers and quantizers.

The names in a spec are looked up in the plugin registries.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from quark.config.enums import Dtype
from quark.config.layer import TensorSpec, levels
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError, UnsupportedError
from quark.numbers.granularity import PerGroup, PerTensor
from quark.numbers.number_format import NumberFormat
from quark.numbers.observer import Observer
from quark.numbers.progressive import ProgressiveQuantizer
from quark.numbers.single_level import SingleLevelQuantizer
from quark.numbers.tensor_quantizer import TensorQuantizer
from quark.numbers.two_level import TwoLevelQuantizer
from quark.plugins import Catalog, documented_object, formats, observers
from quark.plugins.catalog import catalog

_EXAMPLE = 32
"""Number of rows and of columns of an example matrix that every format can pack."""


def number_format(dtype: Dtype | str) -> NumberFormat:
    """Return the number format that is registered as ``dtype``.

    Raises:
        UnknownNameError: No installed plugin provides the format.
    """
    return formats().load_format(Dtype(dtype).name if isinstance(dtype, str) else dtype.name)


def packed_dtype(dtype: Dtype | str) -> torch.dtype:
    """Return the torch dtype in which a checkpoint stores the codes of a format.

    It raises the same errors as `number_format`.
    """
    value = number_format(dtype)
    codes = torch.empty(_EXAMPLE, _EXAMPLE, dtype=value.storage_dtype, device="meta")
    return value.packing.pack(codes, PerGroup(_EXAMPLE), "order").dtype


def canonicalize(spec: TensorSpec) -> tuple[QTensorConfig, ...]:
    """Return the levels of a spec. The number format of each level has filled in the settings that were
    missing."""
    written = (spec,) if isinstance(spec, QTensorConfig) else spec
    return tuple(level for one in written for level in levels(number_format(one.dtype).canonicalize(one)))


def format_of(spec: QTensorConfig) -> NumberFormat:
    """Return the number format of a canonical spec. The format rounds with the spec's ``round_method``."""
    return number_format(spec.dtype).for_spec(spec)


def observer_class(spec: QTensorConfig) -> type[Observer]:
    """Return the observer class that a spec names. If the spec names none, return the default of the number
    format.

    A spec names an observer by the class itself, by the registered name or by the name of the class.

    Raises:
        UnknownNameError: No installed plugin provides the observer.
        ConfigError: The spec's ``observer_cls`` is not an observer.
    """
    named = spec.observer_cls if spec.observer_cls is not None else number_format(spec.dtype).default_observer
    cls = _registered(named) if isinstance(named, str) else named
    if not (isinstance(cls, type) and issubclass(cls, Observer)):
        raise ConfigError(
            f"observer_cls={named!r} of {spec.dtype.name} is not an observer. Give a subclass of quark.numbers.Observer, or its name"
        )
    return cls


def _registered(name: str) -> object:
    """Return the observer whose registered name or class name is ``name``.

    If no observer has this name, return the object that a plugin exports under the name.
    """
    record = next((r for r in observers() if name in (r.class_name, r.name, *r.aliases)), None)
    return documented_object(name) if record is None else observers().load_observer(record.name)


def quantizer_for(spec: TensorSpec, *, activation: bool) -> TensorQuantizer:
    """Return the quantizer of a tensor.

    A number format that has its own scale structure provides the quantizer. For all other formats, the core
    builds it.

    Args:
        spec: The spec of one level, or a sequence of specs, one for each level.
        activation: Whether the tensor is an activation. For an activation, a dynamic scale per channel means
            one scale per token.

    Raises:
        ConfigError: The spec is incomplete, or a format that learns a table cannot quantize this tensor.
        UnknownNameError: A format or an observer is not installed.
        UnsupportedError: The spec has more than two levels, and no number format builds the quantizer.
    """
    return _quantizer(spec if isinstance(spec, QTensorConfig) else tuple(spec), activation, catalog())


@lru_cache(maxsize=1024)
def _quantizer(spec: TensorSpec, activation: bool, plugins: Catalog) -> TensorQuantizer:
    """Return the quantizer of a spec.

    Equal specs share one quantizer as long as ``plugins`` is the same catalog.
    """
    # Copies, because quantizers outlive their configurations, which may be changed.
    specs = tuple(level.copied() for level in canonicalize(spec))
    for level in specs:
        quantizer = format_of(level).quantizer(specs, activation=activation)
        if quantizer is not None:
            return quantizer
    if (error := _table_error(specs, activation=activation)) is not None:
        raise ConfigError(error)
    if len(specs) == 1:
        return level_quantizer(specs[0], activation=activation)
    if len(specs) > 2:
        names = " → ".join(level.dtype.name for level in specs)
        raise UnsupportedError(
            f"no number format builds a quantizer of the {len(specs)} levels {names}. Use one or two levels, or a number format whose "
            "method NumberFormat.quantizer returns a quantizer of these levels"
        )
    first, second = (level_quantizer(level, activation=activation) for level in specs)
    return TwoLevelQuantizer(first, second) if specs[1].is_scale_quant else ProgressiveQuantizer(first, second)


def _table_error(specs: tuple[QTensorConfig, ...], *, activation: bool) -> str | None:
    """Return an error message if a format in ``specs`` learns a table but cannot quantize this tensor. The
    message includes the fix. Otherwise, return None."""
    learning = [spec.dtype.name for spec in specs if format_of(spec).table_shape is not None]
    if not learning or (len(specs) == 1 and not activation):
        return None
    where = "an activation" if activation else f"one of {len(specs)} levels"
    return f"{learning[0]} learns a table from a whole weight, so it cannot be the format of {where}. Use it alone, for weights"


def level_quantizer(spec: QTensorConfig, *, activation: bool) -> SingleLevelQuantizer:
    """Return the quantizer of one level of a canonical spec.

    The level defines its number format, granularity and observer.
    """
    number_format = format_of(spec)
    granularity = PerTensor() if number_format.is_cast else number_format.granularity(spec, activation=activation)
    return SingleLevelQuantizer(spec, granularity, number_format, observer_class(spec))
