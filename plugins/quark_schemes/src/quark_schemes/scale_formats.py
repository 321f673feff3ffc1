"""Scale formats: the number formats in which scales are rounded and stored.

Source: ``scale_format`` and ``scale_type`` of AMD Quark 0.13; OCP Microscaling Formats v1.0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import attrs
import torch
from torch import Tensor

from quark.config.enums import ScaleType
from quark.config.layer import TensorSpec
from quark.config.tensor import QTensorConfig
from quark_schemes.arithmetic.shared_exponent import decode_e8m0, encode_e8m0, shared_exponent_scale
from quark_schemes.arithmetic.small_float import E4M3, E5M3, FloatShape, decode_small, encode_small, round_small_

__all__ = [
    "SMALLEST_SCALE",
    "PlainScales",
    "PowerOfTwoScales",
    "ScaleFormat",
    "ScaleRounding",
    "SmallFloatScales",
    "scale_error",
    "scale_format_of",
    "smallest_scale",
    "with_outer_scale",
]

SMALLEST_SCALE = 2.0**-23
"""Smallest scale of integers: float32's epsilon, as in AMD Quark. Values below half of it become 0."""


def smallest_scale(max_magnitude: float) -> float:
    """Return the smallest allowed scale of an integer format with codes up to ``max_magnitude``.

    This is `SMALLEST_SCALE`, or float32's smallest normal number if float32 cannot represent all the
    integers.
    """
    return SMALLEST_SCALE if max_magnitude < 2.0**24 else float(torch.finfo(torch.float32).tiny)


@attrs.frozen
class ScaleRounding:
    """Describes how scales are rounded, for `quark_schemes.kernels.floats.rounded_scale`.

    If no attribute is set, scales are not rounded.

    Attributes:
        mode: ``"ceil"`` to round up to powers of two, or ``"floor"`` to round down to powers of two.
        shape: The small float to which scales are rounded.
        dtype: The dtype to which scales are rounded, ``"float16"`` or ``"bfloat16"``. Scales are then at
            least ``smallest``.
    """

    mode: str | None = None
    shape: FloatShape | None = None
    dtype: str | None = None
    smallest: float = 0.0


class ScaleFormat(ABC):
    """A number format of scales. The methods accept tensors of any shape."""

    @property
    @abstractmethod
    def rounding(self) -> ScaleRounding:
        """A description of what the method `round` does, for kernels."""

    @abstractmethod
    def round(self, ideal: Tensor) -> Tensor:
        """Round the positive float32 scales ``ideal`` to scales of this format."""

    def encode(self, scale: Tensor) -> Tensor:
        """Encode scales of this format as a checkpoint stores them."""
        return scale

    def decode(self, stored: Tensor) -> Tensor:
        """Undo `encode`: return the scales that ``stored`` represents."""
        return stored


@attrs.frozen
class PlainScales(ScaleFormat):
    """Scales of a torch dtype. Small scales are not rounded to 0."""

    dtype: torch.dtype

    @property
    def rounding(self) -> ScaleRounding:
        if self.dtype is torch.float32:
            return ScaleRounding()
        return ScaleRounding(dtype=str(self.dtype).removeprefix("torch."), smallest=torch.finfo(self.dtype).tiny)

    def round(self, ideal: Tensor) -> Tensor:
        return ideal if self.dtype is torch.float32 else ideal.clamp(min=torch.finfo(self.dtype).tiny).to(self.dtype)


@attrs.frozen
class PowerOfTwoScales(ScaleFormat):
    """Scales that are powers of two.

    The mode ``"ceil"`` rounds scales up, so that no element saturates. The mode ``"floor"`` rounds scales
    down.

    Attributes:
        mode: ``"ceil"`` or ``"floor"``.
        stored: The dtype in a checkpoint: float32, uint8 for E8M0 bytes, or torch's E8M0 dtype.
    """

    mode: str
    stored: torch.dtype

    @property
    def rounding(self) -> ScaleRounding:
        return ScaleRounding(mode=self.mode)

    def round(self, ideal: Tensor) -> Tensor:
        return shared_exponent_scale(ideal, self.mode, 0, 0)

    def encode(self, scale: Tensor) -> Tensor:
        return scale if self.stored is torch.float32 else encode_e8m0(scale).view(self.stored)

    def decode(self, stored: Tensor) -> Tensor:
        return stored if self.stored is torch.float32 else decode_e8m0(stored.view(torch.uint8))


@attrs.frozen
class SmallFloatScales(ScaleFormat):
    """Scales that are small floats.

    A scale that is too small for the format becomes the smallest positive value, not 0.
    """

    shape: FloatShape
    stored: torch.dtype = torch.uint8

    @property
    def rounding(self) -> ScaleRounding:
        return ScaleRounding(shape=self.shape)

    def round(self, ideal: Tensor) -> Tensor:
        rounded = round_small_(ideal.clone(), self.shape).clamp_(min=self.shape.smallest)
        # Inf and NaN stay: if they saturated, a broken block would look like a block of large values.
        return torch.where(torch.isfinite(ideal), rounded, ideal)

    def encode(self, scale: Tensor) -> Tensor:
        return scale.to(self.stored) if self.stored is not torch.uint8 else encode_small(scale, self.shape)

    def decode(self, stored: Tensor) -> Tensor:
        return decode_small(stored.view(torch.uint8), self.shape)


_BY_TYPE: dict[ScaleType, ScaleFormat] = {
    ScaleType.float16: PlainScales(torch.float16),
    ScaleType.bfloat16: PlainScales(torch.bfloat16),
    ScaleType.float8_e5m3: SmallFloatScales(E5M3),
}
_BY_FORMAT: dict[str, ScaleFormat] = {"e4m3": SmallFloatScales(E4M3, torch.float8_e4m3fn), "e5m3": SmallFloatScales(E5M3)}
_NAMES = ("float32", "e8m0", *_BY_FORMAT)
_STORED_POWERS = {ScaleType.pof2: torch.float32, ScaleType.float8_e8m0fnu: torch.float8_e8m0fnu}


def scale_error(spec: QTensorConfig) -> str | None:
    """Return why the ``scale_format`` of a spec is invalid, and what to set instead; None if it is valid."""
    if spec.scale_format in (None, *_NAMES):
        return None
    return f"scale_format={spec.scale_format!r} is unknown to {spec.dtype.name}: use one of {', '.join(_NAMES)}, or None"


def with_outer_scale(spec: QTensorConfig) -> TensorSpec:
    """Return the two levels of a spec with E4M3 scales. Return other specs unchanged.

    E4M3 has only magnitudes from 2^-9 to 448. One more scale for the whole tensor therefore multiplies the
    E4M3 scales. The first level has the quantization of the tensor, and the second level the quantization of
    the scales.
    """
    if spec.scale_format != "e4m3" or spec.is_scale_quant:
        return spec
    outer = QTensorConfig(
        dtype="fp8_e4m3",
        observer_cls="PerTensorMinMaxObserver",
        is_dynamic=spec.is_dynamic,
        qscheme="per_tensor",
        symmetric=True,
        scale_type="float32",
        is_scale_quant=True,
    )
    return (attrs.evolve(spec, scale_format="float32", scale_type="float32"), outer)


def scale_format_of(spec: QTensorConfig) -> ScaleFormat:
    """Return the scale format of a spec.

    The field ``scale_format`` of the spec names the format. If this field is not set, the field
    ``scale_type`` names it. If neither is set, the format is float32.
    """
    if spec.scale_format in _BY_FORMAT:
        return _BY_FORMAT[spec.scale_format]
    if spec.scale_format == "e8m0" or spec.scale_type in _STORED_POWERS:
        stored = _STORED_POWERS.get(spec.scale_type or ScaleType.float, torch.uint8)
        return PowerOfTwoScales("floor" if spec.scale_calculation_mode == "floor" else "ceil", stored)
    return _BY_TYPE.get(spec.scale_type or ScaleType.float, PlainScales(torch.float32))
