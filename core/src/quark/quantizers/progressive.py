"""ProgressiveQuantizer: two levels, of which the second quantizes the codes of the first. FP8 first and INT4 from there, for instance.

``value = code · second scale · first scale``; what a checkpoint holds are the codes of the second stage. Source: spec of the documented
surface, §2.6; of the checkpoint format, §2.2.
"""

from __future__ import annotations

import attrs
from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.quantizers.finite import cast_finite
from quark.quantizers.granularity import Granularity, PerTensor
from quark.quantizers.observer import Observer
from quark.quantizers.qparams import QParams
from quark.quantizers.single_level import SingleLevelQuantizer


@attrs.frozen(eq=False)
class ProgressiveQuantizer:
    """See `quark.quantizers.tensor_quantizer.TensorQuantizer` for what each method promises.

    `QParams` hold the second stage's scale and zero point, and as ``outer_scale`` the first stage's scale.

    Attributes:
        first: One scale over the whole tensor.
        second: Quantizes the values that the first stage's codes stand for, its scale apart.
    """

    first: SingleLevelQuantizer
    second: SingleLevelQuantizer

    @property
    def spec(self) -> tuple[QTensorConfig, ...]:
        """Both levels."""
        return (self.first.spec, self.second.spec)

    @property
    def granularity(self) -> Granularity:
        """Of the second stage, whose codes are stored."""
        return self.second.granularity

    @property
    def is_dynamic(self) -> bool:
        """Whether ranges are found at run time."""
        return self.first.is_dynamic

    @property
    def is_float(self) -> bool:
        """Never."""
        return False

    @property
    def has_tensor_scale(self) -> bool:
        """Whether siblings may share the first stage's scale."""
        return self.first.has_tensor_scale

    def shape_error(self, shape: tuple[int, ...]) -> str | None:
        if not isinstance(self.first.granularity, PerTensor):
            return f"the first of two levels, {self.first.spec.dtype.name}, has one scale over the whole tensor: set qscheme=per_tensor"
        if not self.is_dynamic and self.second.is_dynamic:
            return "both levels are static or both are dynamic: set is_dynamic alike"
        return self.first.shape_error(shape) or self.second.shape_error(shape)

    def observer(self) -> Observer:
        return self.first.observer()

    def qparams_from(self, observer: Observer) -> QParams:
        """The first stage's scale alone, which is all that a range tells."""
        return self.first.qparams_from(observer)

    def outer_scale(self, observer: Observer) -> Tensor:
        """The first stage's scale, of what an observer has seen."""
        return self.first.qparams_from(observer).scale

    def find_qparams(self, x: Tensor, shared: Observer | None = None) -> QParams:
        first = self.first.find_qparams(x, shared)
        return attrs.evolve(self.second.find_qparams(self._between(x, first)), outer_scale=first.scale)

    def round_to_nearest(self, x: Tensor, *, out: Tensor | None = None) -> tuple[Tensor, QParams]:
        first = self.first.find_qparams(x)
        between = self._between(x, first)
        second = self.second.find_qparams(between)
        values = self.second.fake_quantize(between, second, out=between).mul_(first.scale)
        return _delivered(values, x, out), attrs.evolve(second, outer_scale=first.scale)

    def fake_quantize(self, x: Tensor, qparams: QParams | None = None, *, out: Tensor | None = None) -> Tensor:
        if qparams is None:
            return self.round_to_nearest(x, out=out)[0]
        first, second = _parted(qparams)
        between = self._between(x, first)
        return _delivered(self.second.fake_quantize(between, second, out=between).mul_(first.scale), x, out)

    def quantize(self, x: Tensor, qparams: QParams) -> Tensor:
        first, second = _parted(qparams)
        return self.second.quantize(x if x.is_meta else self._between(x, first), second)

    def codes_of(self, values: Tensor, qparams: QParams) -> Tensor:
        # Values of the second stage are none of the first's: its rounding must not come between.
        first, second = _parted(qparams)
        return self.second.codes_of(values if values.is_meta else values.float() / first.scale, second)

    def dequantize(self, codes: Tensor, qparams: QParams) -> Tensor:
        first, second = _parted(qparams)
        return self.second.dequantize(codes, second).mul_(first.scale)

    def pack(self, codes: Tensor, qparams: QParams, *, order: str = "reorder") -> dict[str, Tensor]:
        return {"": self.second.format.packing.pack(codes, self.granularity, order), **self.pack_qparams(qparams, order=order)}

    def pack_qparams(self, qparams: QParams, *, order: str = "reorder") -> dict[str, Tensor]:
        first, second = _parted(qparams)
        stored = self.second.pack_qparams(second, order=order)
        return {"scale": first.scale, **{f"{suffix}_2": tensor for suffix, tensor in stored.items()}}

    def unpack(self, tensors: dict[str, Tensor], shape: tuple[int, ...], *, order: str = "reorder") -> tuple[Tensor, QParams]:
        codes = self.second.format.packing.unpack(tensors[""], self.granularity, order, shape)
        return codes, self.unpack_qparams(tensors, shape, order=order)

    def unpack_qparams(self, tensors: dict[str, Tensor], shape: tuple[int, ...], *, order: str = "reorder") -> QParams:
        stored = {suffix.removesuffix("_2"): tensor for suffix, tensor in tensors.items() if suffix.endswith("_2")}
        return attrs.evolve(self.second.unpack_qparams(stored, shape, order=order), outer_scale=tensors["scale"])

    def empty_qparams(self, shape: tuple[int, ...], device: str) -> QParams:
        first = self.first.empty_qparams(shape, device)
        return attrs.evolve(self.second.empty_qparams(shape, device), outer_scale=first.scale)

    def _between(self, x: Tensor, first: QParams) -> Tensor:
        """The first stage's codes as float32 values, its scale taken off; a tensor of one's own."""
        return self.first.in_scales(x, first)


def _parted(qparams: QParams) -> tuple[QParams, QParams]:
    """The scales of the first stage and of the second."""
    assert qparams.outer_scale is not None
    return QParams(qparams.outer_scale), attrs.evolve(qparams, outer_scale=None)


def _delivered(values: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
    return cast_finite(values, x.dtype) if out is None else out.copy_(cast_finite(values, out.dtype))
