"""The trial of a form finds quantizers that compute something else than a graph would."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import Tensor

import quark
from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig
from quark.numbers import TensorQuantizer, number_format, quantizer_for
from quark.numbers.single_level import SingleLevelQuantizer
from quark_exporters.onnx_layout.trial import reason_against


def quantizers() -> list[tuple[TensorQuantizer, bool]]:
    """The quantizers of all schemes without codebooks, and whether each is of an activation."""
    layers: list[QLayerConfig] = [quark.schemes().get(name).config.load()() for name in quark.schemes().names() if name[:2] != "vq"]
    specs = [(spec, is_input) for layer in layers for spec, is_input in ((layer.weight, False), (layer.input_tensors, True))]
    return [(quantizer_for(spec, activation=is_input), is_input) for spec, is_input in specs if spec is not None]


@pytest.mark.parametrize("opset", [21, 23])
def test_every_scheme_has_a_form(opset: int) -> None:
    reasons = {q.spec: reason_against(q, opset, activation=is_input) for q, is_input in quantizers()}
    assert {spec: reason for spec, reason in reasons.items() if reason is not None} == {}


def per_token(observer: str, dtype: str = "fp8_e4m3", symmetric: bool = True) -> SingleLevelQuantizer:
    spec = QTensorConfig(dtype=dtype, qscheme="per_token", is_dynamic=True, symmetric=symmetric, observer_cls=observer, ch_axis=1)
    quantizer = quantizer_for(spec, activation=True)
    assert isinstance(quantizer, SingleLevelQuantizer)
    return quantizer


class Halves(type(number_format("fp4"))):  # type: ignore[misc]
    """FP4 in which the right half of each group is rounded otherwise."""

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        rounded = super().round_(t.clone())
        half = t.shape[-1] // 2
        return t.copy_(torch.cat([rounded[..., :half], rounded[..., half:] / 2], -1)) if half else t.copy_(rounded)


def test_a_format_that_is_more_than_a_table_is_refused() -> None:
    spec = quark.schemes().get("mxfp4").config.load()().input_tensors
    quantizer = quantizer_for(spec, activation=True)
    assert isinstance(quantizer, SingleLevelQuantizer)
    halves = Halves(**attrs.asdict(quantizer.format, recurse=False))
    assert reason_against(quantizer, 21, activation=True) is None
    reason = reason_against(attrs.evolve(quantizer, format=halves), 21, activation=True)
    assert reason is not None
    assert "rounds differently" in reason


class Clipping(type(quantizer_for(QTensorConfig(dtype="fp8_e4m3", qscheme="per_tensor", is_dynamic=True), activation=True).observer())):  # type: ignore[misc]
    """An observer with half of the range of its data."""

    def range(self) -> tuple[Tensor, Tensor]:
        low, high = super().range()
        return low / 2, high / 2


def test_ranges_that_are_not_those_of_the_tensor_are_refused() -> None:
    quantizer = quantizer_for(QTensorConfig(dtype="fp8_e4m3", qscheme="per_tensor", is_dynamic=True), activation=True)
    assert isinstance(quantizer, SingleLevelQuantizer)
    assert reason_against(quantizer, 21, activation=True) is None
    assert reason_against(attrs.evolve(quantizer, observer_class=Clipping), 21, activation=True) is not None


def test_zero_points_that_are_found_at_run_time_are_refused() -> None:
    spec = QTensorConfig(dtype="uint8", qscheme="per_tensor", is_dynamic=True, symmetric=False, observer_cls="PerTensorMinMaxObserver")
    reason = reason_against(quantizer_for(spec, activation=True), 21, activation=True)
    assert reason is not None
    assert "dynamic zero points" in reason
