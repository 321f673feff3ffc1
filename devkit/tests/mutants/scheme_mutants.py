"""Schemes with one thing wrong each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from quark.base.lazy import LazyRef, ObjectRef
from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig
from quark.numbers import Granularity, Packing, TensorQuantizer
from quark.numbers.from_spec import level_quantizer
from quark.numbers.single_level import SingleLevelQuantizer
from quark.plugins import SchemeRecord

from . import broken_formats, format_mutants, observer_mutants
from .mutant import Mutant

__all__ = ["HEALTHY", "MUTANTS"]

_CALLS, _LATER_CALLS = itertools.count(), itertools.count()


def build(group_size: int = 64) -> QLayerConfig:
    """INT4 weights in groups, static INT8 inputs.

    Args:
        group_size: Elements that share a scale.
    """
    weight = QTensorConfig(dtype="int4", qscheme="per_group", ch_axis=-1, group_size=group_size, symmetric=True, is_dynamic=False)
    return QLayerConfig(weight=weight, input_tensors=cache())


def cache() -> QTensorConfig:
    """INT8 with one static scale."""
    return QTensorConfig(dtype="int8", qscheme="per_tensor", symmetric=True, is_dynamic=False)


_CONSTANT = build()


def _dictionary() -> Any:
    return build().to_dict()


def _nothing() -> QLayerConfig:
    return QLayerConfig()


def _constant() -> QLayerConfig:
    return _CONSTANT


def _alternating() -> QLayerConfig:
    return build(32 if next(_CALLS) % 2 else 64)


def _any_keyword(group_size: int = 64, **more: Any) -> QLayerConfig:
    """INT4 weights.

    Args:
        group_size: Elements that share a scale.
    """
    return build(group_size)


def _unexplained(group_size: int = 64) -> QLayerConfig:
    return build(group_size)


def _ignored(group_size: int = 64) -> QLayerConfig:
    """INT4 weights.

    Args:
        group_size: Elements that share a scale.
    """
    return build()


def _after_many_calls() -> QLayerConfig:
    return build(64 if next(_LATER_CALLS) < 50 else 32)


def other_default(group_size: int = 32) -> QLayerConfig:
    """INT4 weights.

    Args:
        group_size: Elements that share a scale.
    """
    return build() if group_size == 32 and next(_CALLS) % 2 else build(group_size)


def _tuple_option() -> QLayerConfig:
    return QLayerConfig(weight=build().weight.set(observer_options={"percentile": (1, 2)}))  # type: ignore[union-attr]


def _biases() -> QLayerConfig:
    return QLayerConfig(bias=cache())


def _static_of_shared_state() -> QLayerConfig:
    return QLayerConfig(weight=build().weight, input_tensors=cache().set(observer_cls="Grows"))


def _own_format(**fields: Any) -> Callable[[], QLayerConfig]:
    def own() -> QLayerConfig:
        return QLayerConfig(weight=build().weight.set(dtype="mutant_format", **fields))  # type: ignore[union-attr]

    return own


def _own_inputs() -> QLayerConfig:
    spec = _own_format()().weight.set(is_dynamic=True)  # type: ignore[union-attr]
    return QLayerConfig(weight=build().weight, input_tensors=spec)


class Grows(observer_mutants.PlainObserver):
    """Gives a wider range each time that any of its kind is asked."""

    asked = 0

    def range(self) -> tuple[Tensor, Tensor]:
        Grows.asked += 1
        low, high = super().range()
        return low * (1 + 0.01 * Grows.asked), high * (1 + 0.01 * Grows.asked)


class LosesLongRows(broken_formats.Nibbles):
    """Loses the last code of rows that are longer than the core's own trial."""

    def unpack(self, packed: Tensor, granularity: Granularity, order: str, shape: tuple[int, ...]) -> Tensor:
        codes = super().unpack(packed, granularity, order, shape)
        if shape[-1] > 128:
            codes[..., -1] = 0
        return codes


class AnyShape(SingleLevelQuantizer):
    def shape_error(self, shape: tuple[int, ...]) -> str | None:
        return None


class NoShapeError(broken_formats.Plain):
    def quantizer(self, levels: tuple[QTensorConfig, ...], *, activation: bool) -> TensorQuantizer | None:
        usual = level_quantizer(levels[0], activation=activation)
        return AnyShape(usual.spec, usual.granularity, usual.format, usual.observer_class)


def record_of(function: Callable[..., Any] | None = None, **fields: Any) -> SchemeRecord:
    usual = {"name": "mutant_scheme", "summary": "a scheme with one thing wrong", "config": ObjectRef(function or build)}
    return SchemeRecord(**(usual | fields))  # type: ignore[arg-type]


def mutant(check: str, about: str, function: Callable[..., Any] | None = None, **fields: Any) -> Mutant:
    return Mutant(f"scheme:{check}", about, (record_of(function, **fields),))


def with_format(check: str, about: str, value: Any, function: Callable[..., Any] | None = None) -> Mutant:
    return Mutant(f"scheme:{check}", about, (record_of(function or _own_format()), format_mutants.record_of(value)))


HEALTHY = (record_of(kv_cache=ObjectRef(cache)),)
MUTANTS = (
    with_format("is_copied_and_pickled", "has a format that holds a lock", format_mutants.Locked()),
    mutant("builds_a_configuration", "builds a dictionary", _dictionary),
    mutant("builds_a_configuration", "quantizes nothing", _nothing),
    mutant("builds_a_configuration", "builds a layer for its cache", kv_cache=ObjectRef(build)),
    mutant("builds_it_afresh", "gives out one configuration", _constant),
    mutant("builds_it_afresh", "builds another one each time", _alternating),
    mutant("builds_it_afresh", "builds another one after many calls", _after_many_calls),
    mutant("imports_no_torch", "imports torch", config=LazyRef("quark_devkit.small_models:batches")),
    mutant("refuses_unknown_options", "takes any keyword", _any_keyword),
    mutant("lists_its_options", "does not explain its option", _unexplained),
    mutant("lists_its_options", "has another default than it says", other_default),
    mutant("heeds_its_options", "does nothing with its option", _ignored),
    mutant("comes_back_from_json", "has an option that JSON has no form for", _tuple_option),
    mutant("describes_itself", "has no summary", summary=""),
    mutant("describes_itself", "names a client twice", clients=("vLLM", "vLLM")),
    with_format(
        "says_the_same_in_values_codes_and_bytes", "reads one order backwards", format_mutants.with_packing(broken_formats.SwapsOrder())
    ),
    with_format("serves_hard_weights", "has no 0", broken_formats.NoZero()),
    with_format("serves_hard_weights", "makes numbers of NaN and infinity", broken_formats.HidesInf()),
    with_format("rounds_weights", "leaves values as they are", broken_formats.RoundsNothing()),
    with_format("errs_as_its_bits_allow", "has a quarter of the scale", broken_formats.QuarterScale()),
    with_format("serves_activations", "wants at least one row", broken_formats.RefusesEmpty(), _own_inputs),
    with_format("refuses_or_serves_ragged_groups", "accepts any shape", NoShapeError()),
    mutant("shares_global_scales_that_are_there", "has no scale to share", shares_global_scale=True),
    mutant("quantizes_a_model", "quantizes biases alone, of which the model has none", _biases),
    with_format("loads_to_the_same_logits", "loses the last code of long rows", format_mutants.with_packing(LosesLongRows())),
    with_format(
        "computes_from_codes", "unpacks in the memory of the stored codes", format_mutants.with_packing(broken_formats.UnmasksInPlace())
    ),
    mutant("streams_to_the_same_bytes", "builds another configuration each time", _alternating),
    with_format("stores_its_effective_bits", "stores a byte for four bits", format_mutants.with_packing(Packing())),
    Mutant(
        "scheme:calibrates_static_activations",
        "has an observer that keeps state on the class",
        (record_of(_static_of_shared_state), observer_mutants.record_of(Grows)),
    ),
    mutant("serves_parts_of_attention", "builds a layer for its cache", kv_cache=ObjectRef(build)),
)
