"""MultiLevelQuantizer: base of tensor quantizers with more than one scale for an element."""

from __future__ import annotations

from abc import ABC

import torch
from torch import Tensor

from quark.config.layer import TensorSpec
from quark.numbers.granularity import Granularity
from quark.numbers.number_format import QParams
from quark.numbers.tensor_quantizer import TensorQuantizer
from quark.numbers.tiles import cast_finite

__all__ = ["MultiLevelQuantizer"]


class MultiLevelQuantizer(TensorQuantizer, ABC):
    """Base of quantizers with several levels; `TensorQuantizer` documents the methods.

    A subclass with a scale structure of its own owes the abstract methods. It is reached from a spec through
    `quark.numbers.NumberFormat.quantizer`. Its outer scale is one for the whole tensor, or one for each row
    of a weight.
    """

    @property
    def spec(self) -> TensorSpec:
        """The specs of the levels."""
        specs = tuple(level.spec for level in self.levels)
        return specs if len(specs) > 1 else specs[0]

    @property
    def granularity(self) -> Granularity:
        """That of the level whose codes are stored."""
        return self.stored_level.granularity

    @property
    def is_dynamic(self) -> bool:
        """Whether ranges are found at run time."""
        return self.levels[0].is_dynamic

    @property
    def is_float(self) -> bool:
        """False."""
        return False

    @property
    def has_tensor_scale(self) -> bool:
        """Whether one scale spans the whole tensor; False by default."""
        return False

    @property
    def has_one_product(self) -> bool:
        """False, unless a subclass says otherwise: the product of two scales is rounded once more."""
        return False

    def round_to_nearest(self, x: Tensor, *, out: Tensor | None = None) -> tuple[Tensor, QParams]:
        qparams = self.find_qparams(x)
        return self.fake_quantize(x, qparams, out=out), qparams

    def fake_quantize(self, x: Tensor, qparams: QParams | None = None, *, out: Tensor | None = None) -> Tensor:
        if qparams is None:
            return self.round_to_nearest(x, out=out)[0]
        values = self.dequantize(self.quantize(x, qparams), qparams)
        return cast_finite(values, x.dtype) if out is None else out.copy_(cast_finite(values, out.dtype))

    def codes_of(self, values: Tensor, qparams: QParams) -> Tensor:
        return self.quantize(values, qparams)

    def recovers_codes(self, dtype: torch.dtype, qparams: QParams) -> bool:
        """Return False, unless a subclass knows better."""
        return False

    def pack(self, codes: Tensor, qparams: QParams, *, order: str = "reorder") -> dict[str, Tensor]:
        packing = self.stored_level.format.packing
        return {"": packing.pack(codes, self.granularity, order), **self.pack_qparams(qparams, order=order)}

    def unpack(self, tensors: dict[str, Tensor], shape: tuple[int, ...], *, order: str = "reorder") -> tuple[Tensor, QParams]:
        codes = self.stored_level.format.packing.unpack(tensors[""], self.granularity, order, shape)
        return codes, self.unpack_qparams(tensors, shape, order=order)
