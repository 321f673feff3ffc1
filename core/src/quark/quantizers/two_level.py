"""TwoLevelQuantizer: two levels, of which the second quantizes the scales of the first. NVFP4 and its relatives.

``value = code · block scale · outer scale``: block scales are in a small format, relative to one outer scale over the whole tensor, with
which the largest of them is the largest value of that format. Source: spec of the documented surface, §2.6.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.quantizers.granularity import Granularity, PerTensor
from quark.quantizers.observer import Observer
from quark.quantizers.parts import in_parts
from quark.quantizers.qparams import QParams
from quark.quantizers.single_level import SingleLevelQuantizer

_OUTER_OF_ZEROS = 2.0**-23


@attrs.frozen(eq=False)
class TwoLevelQuantizer:
    """See `quark.quantizers.tensor_quantizer.TensorQuantizer` for what each method promises.

    `QParams` hold the block scales as values of the second stage's format, and the outer scale. Of activations whose blocks are dynamic
    only the outer scale is kept, as ``scale``: block scales are found at each call.

    Attributes:
        blocks: The first stage; its scales are in float32.
        scales: The second stage: one scale over the whole tensor.
    """

    blocks: SingleLevelQuantizer
    scales: SingleLevelQuantizer

    @property
    def spec(self) -> tuple[QTensorConfig, ...]:
        """Both levels."""
        return (self.blocks.spec, self.scales.spec)

    @property
    def granularity(self) -> Granularity:
        """Of the first stage."""
        return self.blocks.granularity

    @property
    def is_dynamic(self) -> bool:
        """Whether nothing is found beforehand, not even the outer scale."""
        return self.scales.is_dynamic

    @property
    def is_float(self) -> bool:
        """Never."""
        return False

    @property
    def has_tensor_scale(self) -> bool:
        """Always: the outer scale."""
        return True

    @property
    def _keeps_outer_only(self) -> bool:
        return self.blocks.is_dynamic and not self.is_dynamic

    def shape_error(self, shape: tuple[int, ...]) -> str | None:
        if not isinstance(self.scales.granularity, PerTensor):
            return f"scales are quantized with one scale over all of them: set qscheme=per_tensor in the second stage, {_name(self.scales)}"
        if self.blocks.spec.symmetric is False:
            return f"scales of {_name(self.blocks)} with zero points cannot be quantized: set symmetric=True"
        return self.blocks.shape_error(shape) or self.scales.shape_error(())

    def observer(self) -> Observer:
        return self.scales.observer()

    def qparams_from(self, observer: Observer) -> QParams:
        return QParams(self.outer_scale(observer))

    def find_qparams(self, x: Tensor, shared: Observer | None = None) -> QParams:
        observer = shared or self._seen(x)
        return self._blocks_under(x, self.outer_scale(observer))

    def round_to_nearest(self, x: Tensor, *, out: Tensor | None = None) -> tuple[Tensor, QParams]:
        return self._round_under(self.outer_scale(self._seen(x)), x, out)

    def fake_quantize(self, x: Tensor, qparams: QParams | None = None, *, out: Tensor | None = None) -> Tensor:
        if qparams is None:
            return self.round_to_nearest(x, out=out)[0]
        if qparams.outer_scale is None:
            return self._round_under(qparams.scale, x, out)[0]
        return self.blocks.fake_quantize(x, qparams, out=out)

    def _round_under(self, outer: Tensor, x: Tensor, out: Tensor | None) -> tuple[Tensor, QParams]:
        """Values of ``x`` under an outer scale, and the scales with which they were made."""
        if not self.granularity.is_local or x.numel() == 0 or not (out is None or out.is_contiguous()):
            qparams = self._blocks_under(x, outer)
            return self.blocks.fake_quantize(x, qparams, out=out), qparams
        result = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out

        def work(part: Tensor, place: Tensor) -> QParams:
            qparams = self._blocks_under(part, outer)
            self.blocks.fake_quantize(part, qparams, out=place)
            return qparams

        return result, in_parts(x, result, self.granularity.scale_shape(tuple(x.shape)), work)

    def quantize(self, x: Tensor, qparams: QParams) -> Tensor:
        return self.blocks.quantize(x, self._blocks_under(x, qparams.scale) if qparams.outer_scale is None else qparams)

    def codes_of(self, values: Tensor, qparams: QParams) -> Tensor:
        return self.blocks.codes_of(values, qparams)

    def dequantize(self, codes: Tensor, qparams: QParams) -> Tensor:
        return self.blocks.dequantize(codes, qparams)

    def pack(self, codes: Tensor, qparams: QParams, *, order: str = "reorder") -> dict[str, Tensor]:
        return {"": self.blocks.format.packing.pack(codes, self.granularity, order), **self.pack_qparams(qparams, order=order)}

    def pack_qparams(self, qparams: QParams, *, order: str = "reorder") -> dict[str, Tensor]:
        if qparams.outer_scale is None:
            return {"scale_2": qparams.scale}
        encoded = attrs.evolve(qparams, scale=self.scales.format.encode(qparams.scale))
        return {**self.blocks.pack_qparams(encoded, order=order), "scale_2": qparams.outer_scale}

    def unpack(self, tensors: dict[str, Tensor], shape: tuple[int, ...], *, order: str = "reorder") -> tuple[Tensor, QParams]:
        codes = self.blocks.format.packing.unpack(tensors[""], self.granularity, order, shape)
        return codes, self.unpack_qparams(tensors, shape, order=order)

    def unpack_qparams(self, tensors: dict[str, Tensor], shape: tuple[int, ...], *, order: str = "reorder") -> QParams:
        if "scale" not in tensors:
            return QParams(tensors["scale_2"])
        stored = self.blocks.unpack_qparams(tensors, shape, order=order)
        return QParams(self.scales.format.decode(stored.scale), stored.zero_point, tensors["scale_2"])

    def empty_qparams(self, shape: tuple[int, ...], device: str) -> QParams:
        outer = torch.ones((), dtype=torch.float32, device=device)
        if self._keeps_outer_only:
            return QParams(outer)
        return QParams(torch.ones(self.granularity.scale_shape(shape), dtype=torch.float32, device=device), None, outer)

    def _seen(self, x: Tensor) -> Observer:
        observer = self.observer()
        observer.observe(x if x.numel() else x.new_zeros(1))
        return observer

    def outer_scale(self, observer: Observer) -> Tensor:
        """The outer scale of a range: one division by both reaches, so that nothing is rounded in between."""
        low, high = observer.range()
        amax = torch.maximum(-low, high)
        outer = amax / (self.blocks.format.max_magnitude(self.blocks.spec) * self.scales.format.max_magnitude(self.scales.spec))
        return torch.where(outer == 0, _OUTER_OF_ZEROS, outer)

    def _blocks_under(self, x: Tensor, outer: Tensor) -> QParams:
        """Block scales of ``x`` relative to ``outer``."""
        if x.numel() == 0:
            return QParams(torch.ones(self.granularity.scale_shape(tuple(x.shape)), device=x.device), None, outer)
        observer = self.blocks.observer()
        observer.observe(x)
        low, high = observer.range()
        amax, reach = torch.maximum(-low, high), self.blocks.format.max_magnitude(self.blocks.spec)
        # Scales that are stored come of one division. Those of activations are found first and made relative then: bits depend on it.
        relative = amax / reach / outer if self._keeps_outer_only else amax / (outer * reach)
        return QParams(self._stored(relative), None, outer)

    def block_scales(self, amax: Tensor, outer: Tensor) -> Tensor:
        """Scales of a weight's blocks relative to ``outer``, as stored; ``amax`` is the largest magnitude of each, any shape."""
        return self._stored(amax / (outer * self.blocks.format.max_magnitude(self.blocks.spec)))

    def _stored(self, relative: Tensor) -> Tensor:
        scale = self.scales.format.round_(relative)
        # A scale that is too small for its format makes its block 0, whatever it is replaced by; 1 divides without harm.
        return torch.where(scale == 0, 1.0, scale)


def _name(stage: SingleLevelQuantizer) -> str:
    return stage.spec.dtype.name
