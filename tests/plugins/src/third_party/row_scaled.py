"""Weights with two levels of scales: ``value = code · group scale · row scale``.

Group scales are whole numbers from 1 to 63, as in the K-quants of llama.cpp; the row scale is a float32 for
each output channel.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from quark.base.scalars import divided
from quark.config.enums import QSchemeType
from quark.config.tensor import QTensorConfig
from quark.numbers import NumberFormat, Observer, PerChannel, QParams, TensorQuantizer, level_quantizer
from quark.numbers.single_level import SingleLevelQuantizer

LARGEST = 63
"""The largest group scale, of six bits."""
SMALLEST_ROW_SCALE = 2.0**-100
"""Scale of a row whose weights are all 0."""


class RowScaledInt4(NumberFormat):
    """The format of the elements, −7…7, and the maker of its weight quantizer."""

    name = "third_row_scaled"
    bits = 8
    storage_dtype = torch.int8

    def max_magnitude(self, spec: QTensorConfig) -> float:
        return 7.0

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return t.round_().clamp_(-7, 7)

    def encode(self, t: Tensor) -> Tensor:
        return t.to(torch.int8)

    def decode(self, codes: Tensor) -> Tensor:
        return codes.float()

    def spec_error(self, spec: QTensorConfig) -> str | None:
        if spec.qscheme is not QSchemeType.per_group or spec.ch_axis not in (-1, 1) or spec.is_dynamic is not False:
            return f"{self.name} is for weights in groups of columns: set qscheme=per_group, ch_axis=-1, is_dynamic=False"
        if spec.scale_format not in (None, "uint8"):
            return f"{self.name} has group scales in six bits, stored in eight: leave out scale_format, or set it to 'uint8'"
        return super().spec_error(attrs.evolve(spec, scale_format=None))

    def canonicalize(self, spec: QTensorConfig) -> QTensorConfig:
        return attrs.evolve(spec, scale_format="uint8")

    def quantizer(self, levels: tuple[QTensorConfig, ...], *, activation: bool) -> RowScaledQuantizer | None:
        return None if activation or len(levels) > 1 else RowScaledQuantizer(level_quantizer(levels[0], activation=False))


@attrs.frozen(eq=False)
class RowScaledQuantizer(TensorQuantizer):
    """Its `QParams` have the group scales as whole numbers, ``[O, groups]`` in float32, and the row scales ``[O]``."""

    elements: SingleLevelQuantizer

    @property
    def levels(self) -> tuple[SingleLevelQuantizer, ...]:
        return (self.elements,)

    @property
    def stored_level(self) -> SingleLevelQuantizer:
        return self.elements

    def shape_error(self, shape: tuple[int, ...]) -> str | None:
        if len(shape) != 2:
            return f"of shape {list(shape)} has no rows with a scale each: third_row_scaled is for matrices"
        return self.elements.shape_error(shape)

    def observer(self) -> Observer:
        return self.elements.observer_class(self.elements.spec, PerChannel(0))

    def qparams_from(self, observer: Observer) -> QParams:
        low, high = observer.range()
        return QParams(divided(torch.maximum(-low, high), 7.0 * LARGEST).clamp(min=SMALLEST_ROW_SCALE))

    def outer_scale(self, x: Tensor, shared: Observer | None = None) -> Tensor:
        observer = self.observer()
        observer.observe(x if x.numel() else x.new_zeros(x.shape[0], 1))
        return self.qparams_from(observer).scale

    def scales_from_ranges(self, low: Tensor, high: Tensor, outer: Tensor | None, *, observed: bool = False) -> QParams:
        return QParams((torch.maximum(-low, high) / (7.0 * outer)).round().clamp(1, LARGEST))

    def find_qparams(self, x: Tensor, shared: Observer | None = None) -> QParams:
        if x.numel() == 0:
            return self.empty_qparams(tuple(x.shape), str(x.device))
        observer, outer = self.elements.observer(), self.outer_scale(x)
        observer.observe(x)
        return attrs.evolve(self.scales_from_ranges(*observer.range(), outer[:, None]), outer_scale=outer)

    def quantize(self, x: Tensor, qparams: QParams) -> Tensor:
        return self.elements.quantize(x, _product(qparams))

    def dequantize(self, codes: Tensor, qparams: QParams) -> Tensor:
        return self.elements.dequantize(codes, _product(qparams))

    def pack_qparams(self, qparams: QParams, *, order: str = "reorder") -> dict[str, Tensor]:
        return {"scale": qparams.scale.to(torch.uint8), "scale_2": qparams.outer_scale}

    def unpack_qparams(self, tensors: dict[str, Tensor], shape: tuple[int, ...], *, order: str = "reorder") -> QParams:
        return QParams(tensors["scale"].float(), None, tensors["scale_2"])

    def empty_qparams(self, shape: tuple[int, ...], device: str) -> QParams:
        groups = torch.ones(self.granularity.scale_shape(shape), device=device)
        return QParams(groups, None, torch.ones(shape[0], device=device))


def _product(qparams: QParams) -> QParams:
    """Return the products of group and row scales: one scale for each group."""
    return QParams(qparams.scale * qparams.outer_scale[:, None])


ROW_SCALED_INT4 = RowScaledInt4()
