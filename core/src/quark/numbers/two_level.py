"""`TwoLevelQuantizer` has a second level that quantizes the scales of the first level, as in NVFP4.

A value is ``code · block scale · outer scale``. Block scales have a narrow number format. The whole tensor
has one outer scale, chosen such that the largest block scale becomes the largest value of this format.
Sources: NVIDIA's NVFP4, and ``ScaleQuantSpec`` of AMD Quark 0.13.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from quark.base.scalars import divided
from quark.numbers.granularity import PerTensor
from quark.numbers.kernel_rounding import FusedRounding, RelativeScales, device_code, fused_rounding
from quark.numbers.number_format import QParams
from quark.numbers.observer import Observer
from quark.numbers.single_level import SingleLevelQuantizer
from quark.numbers.tensor_quantizer import TensorQuantizer
from quark.numbers.tiles import in_parts

OUTER_SCALE_OF_ZEROS = 2.0**-23
"""The outer scale of a tensor of zeros, whose ideal scale would be 0.

The value is float32's machine epsilon, as in AMD Quark.
"""


@attrs.frozen(eq=False)
class TwoLevelQuantizer(TensorQuantizer):
    """A quantizer whose scales are quantized too. `quark.numbers.TensorQuantizer` documents the methods.

    `QParams` contain the outer scale and the block scales. Block scales are values of the scale level's
    number format. For activations with dynamic block scales, the field ``scale`` contains the outer scale,
    and each call computes the block scales.

    Attributes:
        element_level: The quantizer of the elements, which computes float32 scales of blocks.
        scale_level: The quantizer of the block scales. It has one scale for the whole tensor.
    """

    element_level: SingleLevelQuantizer
    scale_level: SingleLevelQuantizer

    @property
    def levels(self) -> tuple[SingleLevelQuantizer, ...]:
        """The quantizer of the elements, and then the quantizer of the block scales."""
        return (self.element_level, self.scale_level)

    @property
    def stored_level(self) -> SingleLevelQuantizer:
        """The quantizer of the elements."""
        return self.element_level

    @property
    def is_dynamic(self) -> bool:
        """Whether every scale, including the outer scale, is computed at run time."""
        return self.scale_level.is_dynamic

    @property
    def has_tensor_scale(self) -> bool:
        """Always True, because the whole tensor has one outer scale."""
        return True

    @property
    def _keeps_outer_only(self) -> bool:
        return self.element_level.is_dynamic and not self.is_dynamic

    def shape_error(self, shape: tuple[int, ...]) -> str | None:
        elements, scales = self.element_level, self.scale_level
        if not isinstance(scales.granularity, PerTensor):
            return f"scales are quantized with one scale over all of them: set qscheme=per_tensor in the second level, {_name(scales)}"
        if elements.spec.symmetric is False:
            return f"scales of {_name(elements)} with zero points cannot be quantized: set symmetric=True"
        if elements.spec.scale_format not in (None, "float32"):
            return f"scales of {_name(elements)} are quantized by the second level, {_name(scales)}: leave out scale_format in the first"
        return elements.shape_error(shape) or scales.shape_error(())

    def observer(self) -> Observer:
        return self.scale_level.observer()

    def qparams_from(self, observer: Observer) -> QParams:
        """Return only the outer scale. Block scales are computed from the tensor itself."""
        low, high = observer.range()
        # One division by both largest magnitudes, so that nothing is rounded in between.
        outer = divided(torch.maximum(-low, high), _max_magnitude(self.element_level) * _max_magnitude(self.scale_level))
        return QParams(torch.where(outer == 0, OUTER_SCALE_OF_ZEROS, outer))

    def outer_scale(self, x: Tensor, shared: Observer | None = None) -> Tensor:
        if shared is None:
            shared = self.observer()
            shared.observe(x if x.numel() else x.new_zeros(1))
        return self.qparams_from(shared).scale

    def scales_from_ranges(self, low: Tensor, high: Tensor, outer: Tensor | None, *, observed: bool = False) -> QParams:
        assert outer is not None
        return QParams(self._stored(torch.maximum(-low, high) / (outer * _max_magnitude(self.element_level))))

    def find_qparams(self, x: Tensor, shared: Observer | None = None) -> QParams:
        return self._block_qparams(x, self.outer_scale(x, shared))

    def round_to_nearest(self, x: Tensor, *, out: Tensor | None = None) -> tuple[Tensor, QParams]:
        return self._round_under(self.outer_scale(x), x, out)

    def fake_quantize(self, x: Tensor, qparams: QParams | None = None, *, out: Tensor | None = None) -> Tensor:
        if qparams is None:
            return self.round_to_nearest(x, out=out)[0]
        if qparams.outer_scale is None:
            return self._round_under(qparams.scale, x, out)[0]
        return self.element_level.fake_quantize(x, qparams, out=out)

    def _round_under(self, outer: Tensor, x: Tensor, out: Tensor | None) -> tuple[Tensor, QParams]:
        """Compute block scales of ``x`` for a given outer scale, and return the rounded values and the
        scales."""
        if (fused := self._fused(x)) is not None:
            result = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
            return result, fused.found(x, result, self._relative(outer))
        if not self.granularity.is_local or x.numel() == 0 or not (out is None or out.is_contiguous()):
            qparams = self._block_qparams(x, outer)
            return self.element_level.fake_quantize(x, qparams, out=out), qparams
        result = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out

        def round_part(part: Tensor, place: Tensor) -> QParams:
            qparams = self._block_qparams(part, outer)
            self.element_level.fake_quantize(part, qparams, out=place)
            return qparams

        return result, in_parts(x, result, self.granularity.scale_shape(tuple(x.shape)), round_part)

    def quantize(self, x: Tensor, qparams: QParams) -> Tensor:
        return self.element_level.quantize(x, self._block_qparams(x, qparams.scale) if qparams.outer_scale is None else qparams)

    def recovers_codes(self, dtype: torch.dtype, qparams: QParams) -> bool:
        return qparams.outer_scale is not None and self.element_level.recovers_codes(dtype, qparams)

    def dequantize(self, codes: Tensor, qparams: QParams) -> Tensor:
        return self.element_level.dequantize(codes, qparams)

    def dequantize_to(self, codes: Tensor, qparams: QParams, out: Tensor) -> None:
        self.element_level.dequantize_to(codes, qparams, out)

    def pack_qparams(self, qparams: QParams, *, order: str = "reorder") -> dict[str, Tensor]:
        if qparams.outer_scale is None:
            return {"scale_2": qparams.scale}
        encoded = attrs.evolve(qparams, scale=self.scale_level.format.encode(qparams.scale))
        return {**self.element_level.pack_qparams(encoded, order=order), "scale_2": qparams.outer_scale}

    def unpack_qparams(self, tensors: dict[str, Tensor], shape: tuple[int, ...], *, order: str = "reorder") -> QParams:
        if "scale" not in tensors:
            return QParams(tensors["scale_2"])
        stored = self.element_level.unpack_qparams(tensors, shape, order=order)
        return QParams(self.scale_level.format.decode(stored.scale), stored.zero_point, tensors["scale_2"])

    def empty_qparams(self, shape: tuple[int, ...], device: str) -> QParams:
        outer = torch.ones((), dtype=torch.float32, device=device)
        if self._keeps_outer_only:
            return QParams(outer)
        return QParams(torch.ones(self.granularity.scale_shape(shape), dtype=torch.float32, device=device), None, outer)

    def _block_qparams(self, x: Tensor, outer: Tensor) -> QParams:
        """Return the outer scale ``outer`` and the block scales of ``x``, in units of ``outer``."""
        if x.numel() == 0:
            return QParams(torch.ones(self.granularity.scale_shape(tuple(x.shape)), device=x.device, dtype=torch.float32), None, outer)
        if (fused := self._fused(x)) is not None:
            return fused.found(x, under=self._relative(outer))
        observer = self.element_level.observer()
        observer.observe(x)
        low, high = observer.range()
        if not self._keeps_outer_only:
            return attrs.evolve(self.scales_from_ranges(low, high, outer), outer_scale=outer)
        # As in AMD Quark: scales of activations are divided by the outer scale in a second division, and
        # scales of weights take one division.
        return QParams(self._stored(divided(torch.maximum(-low, high), _max_magnitude(self.element_level)) / outer), None, outer)

    def _fused(self, x: Tensor) -> FusedRounding | None:
        """Return the kernel that computes block scales and rounds in one pass, or None if torch operations do
        this."""
        fused = fused_rounding(self.element_level, x)
        return fused if fused is not None and fused.finds_scales and device_code(self.scale_level) is not None else None

    def _relative(self, outer: Tensor) -> RelativeScales:
        """Return the parameters with which the kernel computes the same block scales as `_block_qparams`."""
        return RelativeScales(self.scale_level, outer, _max_magnitude(self.element_level), not self._keeps_outer_only)

    def _stored(self, relative: Tensor) -> Tensor:
        scale = self.scale_level.format.round_(relative)
        # A scale that is too small for its format makes all values of its block 0; 1 replaces it as a
        # harmless divisor.
        return torch.where(scale == 0, 1.0, scale)


def _name(level: SingleLevelQuantizer) -> str:
    return level.spec.dtype.name


def _max_magnitude(level: SingleLevelQuantizer) -> float:
    return level.format.max_magnitude(level.spec)
