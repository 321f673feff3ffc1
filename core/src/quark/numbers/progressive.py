"""`ProgressiveQuantizer` has two levels, for instance FP8 and INT4.

The second level quantizes the codes of the first level. Dequantization computes ``value = code · second scale
· first scale``. A checkpoint stores the codes of the second level. Source: AMD Quark 0.13's
``ProgressiveSpec``.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from quark.numbers.granularity import PerTensor
from quark.numbers.number_format import QParams
from quark.numbers.observer import Observer
from quark.numbers.single_level import SingleLevelQuantizer
from quark.numbers.tensor_quantizer import TensorQuantizer
from quark.numbers.tiles import cast_finite


@attrs.frozen(eq=False)
class ProgressiveQuantizer(TensorQuantizer):
    """A quantizer with two levels. `quark.numbers.TensorQuantizer` documents the methods.

    `QParams` contain the scale and the zero point of the second level. Their ``outer_scale`` is the scale of
    the first level.

    Attributes:
        first_level: The quantizer of the tensor. It has one scale for the whole tensor.
        second_level: The quantizer of the first level's codes. A checkpoint stores the codes of this level.
    """

    first_level: SingleLevelQuantizer
    second_level: SingleLevelQuantizer

    @property
    def levels(self) -> tuple[SingleLevelQuantizer, ...]:
        """The quantizer of the first level, and then the quantizer of the second level."""
        return (self.first_level, self.second_level)

    @property
    def stored_level(self) -> SingleLevelQuantizer:
        """The quantizer of the second level."""
        return self.second_level

    @property
    def has_tensor_scale(self) -> bool:
        """Whether the layers of an input group may share the first level's scale."""
        return self.first_level.has_tensor_scale

    def shape_error(self, shape: tuple[int, ...]) -> str | None:
        if not isinstance(self.first_level.granularity, PerTensor):
            return (
                f"the first of two levels, {self.first_level.spec.dtype.name}, needs one scale for the whole tensor: set qscheme=per_tensor"
            )
        if not self.is_dynamic and self.second_level.is_dynamic:
            return "both levels must be static or both dynamic: set is_dynamic alike"
        return self.first_level.shape_error(shape) or self.second_level.shape_error(shape)

    def observer(self) -> Observer:
        return self.first_level.observer()

    def qparams_from(self, observer: Observer) -> QParams:
        """Return only the scale of the first level.

        The second level computes its scales from the tensor itself.
        """
        return self.first_level.qparams_from(observer)

    def outer_scale(self, x: Tensor, shared: Observer | None = None) -> Tensor:
        return self.first_level.find_qparams(x, shared).scale

    def scales_from_ranges(self, low: Tensor, high: Tensor, outer: Tensor | None, *, observed: bool = False) -> QParams:
        assert outer is not None
        low, high = low / outer, high / outer
        if observed:
            low, high = self.first_level.format.round_(low), self.first_level.format.round_(high)
        return self.second_level.format.qparams(low, high, self.second_level.spec)

    def find_qparams(self, x: Tensor, shared: Observer | None = None) -> QParams:
        first = self.first_level.find_qparams(x, shared)
        return attrs.evolve(self.second_level.find_qparams(self.first_level.in_scales(x, first)), outer_scale=first.scale)

    def round_to_nearest(self, x: Tensor, *, out: Tensor | None = None) -> tuple[Tensor, QParams]:
        first = self.first_level.find_qparams(x)
        codes = self.first_level.in_scales(x, first)
        second = self.second_level.find_qparams(codes)
        values = self.second_level.fake_quantize(codes, second, out=codes).mul_(first.scale)
        return _cast(values, x, out), attrs.evolve(second, outer_scale=first.scale)

    def fake_quantize(self, x: Tensor, qparams: QParams | None = None, *, out: Tensor | None = None) -> Tensor:
        if qparams is None:
            return self.round_to_nearest(x, out=out)[0]
        first, second = _by_level(qparams)
        codes = self.first_level.in_scales(x, first)
        return _cast(self.second_level.fake_quantize(codes, second, out=codes).mul_(first.scale), x, out)

    def quantize(self, x: Tensor, qparams: QParams) -> Tensor:
        first, second = _by_level(qparams)
        return self.second_level.quantize(x if x.is_meta else self.first_level.in_scales(x, first), second)

    def codes_of(self, values: Tensor, qparams: QParams) -> Tensor:
        # Values of the second level are not on the first level's grid, so the first level must not round them
        # again.
        first, second = _by_level(qparams)
        return self.second_level.codes_of(values if values.is_meta else values.float() / first.scale, second)

    def recovers_codes(self, dtype: torch.dtype, qparams: QParams) -> bool:
        return self.second_level.recovers_codes(dtype, qparams)

    def dequantize(self, codes: Tensor, qparams: QParams) -> Tensor:
        first, second = _by_level(qparams)
        return self.second_level.dequantize(codes, second).mul_(first.scale)

    def pack_qparams(self, qparams: QParams, *, order: str = "reorder") -> dict[str, Tensor]:
        first, second = _by_level(qparams)
        stored = self.second_level.pack_qparams(second, order=order)
        return {"scale": first.scale, **{f"{suffix}_2": tensor for suffix, tensor in stored.items()}}

    def unpack_qparams(self, tensors: dict[str, Tensor], shape: tuple[int, ...], *, order: str = "reorder") -> QParams:
        stored = {suffix.removesuffix("_2"): tensor for suffix, tensor in tensors.items() if suffix.endswith("_2")}
        return attrs.evolve(self.second_level.unpack_qparams(stored, shape, order=order), outer_scale=tensors["scale"])

    def empty_qparams(self, shape: tuple[int, ...], device: str) -> QParams:
        first = self.first_level.empty_qparams(shape, device)
        return attrs.evolve(self.second_level.empty_qparams(shape, device), outer_scale=first.scale)


def _by_level(qparams: QParams) -> tuple[QParams, QParams]:
    """Return the scales of the first level and the scales of the second level."""
    assert qparams.outer_scale is not None
    return QParams(qparams.outer_scale), attrs.evolve(qparams, outer_scale=None)


def _cast(values: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
    return cast_finite(values, x.dtype) if out is None else out.copy_(cast_finite(values, out.dtype))
