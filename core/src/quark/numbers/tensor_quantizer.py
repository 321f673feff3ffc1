"""TensorQuantizer: the base of all quantizers of tensors.

`quantize`, `dequantize` and `fake_quantize` agree exactly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quark.config.layer import TensorSpec
from quark.numbers.granularity import Granularity
from quark.numbers.number_format import QParams
from quark.numbers.observer import Observer
from quark.numbers.tiles import cast_finite

if TYPE_CHECKING:
    from quark.numbers.single_level import SingleLevelQuantizer


class TensorQuantizer(ABC):
    """Interface of a tensor's quantization, of one level or several, for modules, algorithms, checkpoints.

    A new kind of quantizer, with several levels or its own scale structure, derives from it and defines the
    abstract methods. There is one outer scale for the whole tensor, or one for each row of a weight. A number
    format returns the quantizer from `quark.numbers.NumberFormat.quantizer`.
    """

    @property
    @abstractmethod
    def levels(self) -> tuple[SingleLevelQuantizer, ...]:
        """The levels, in the order of the spec; each has its own scales."""

    @property
    @abstractmethod
    def stored_level(self) -> SingleLevelQuantizer:
        """The level whose codes are stored."""

    @property
    def spec(self) -> TensorSpec:
        """The canonical spec of this quantizer."""
        specs = tuple(level.spec for level in self.levels)
        return specs if len(specs) > 1 else specs[0]

    @property
    def granularity(self) -> Granularity:
        """The elements that share a scale of the stored level."""
        return self.stored_level.granularity

    @property
    def is_dynamic(self) -> bool:
        """Whether ranges are found at run time."""
        return bool(self.levels[0].spec.is_dynamic)

    @property
    def is_float(self) -> bool:
        """Whether quantization is only a cast (float16, bfloat16)."""
        return False

    @property
    def has_tensor_scale(self) -> bool:
        """Whether one scale, or an outer scale, spans the whole tensor, so that input groups may share it."""
        return False

    @property
    def has_one_product(self) -> bool:
        """Whether a value is one product, ``(code − zero_point) · scale``.

        If not (two scales, an offset), the last bit depends on the order of operations, and `WeightGrid`
        computes its values from codes.
        """
        return False

    @abstractmethod
    def shape_error(self, shape: tuple[int, ...]) -> str | None:
        """Return why a tensor of that shape cannot be quantized, and the fix, or None. Needs no data."""

    @abstractmethod
    def observer(self) -> Observer:
        """Return a fresh observer for calibration."""

    @abstractmethod
    def qparams_from(self, observer: Observer) -> QParams:
        """Return the scales of the ranges that an observer has found."""

    @abstractmethod
    def outer_scale(self, x: Tensor, shared: Observer | None = None) -> Tensor | None:
        """Return the scale above the stored level's, ``[]`` or ``[O]`` for a weight ``[O, I]``, or None.

        Whether it is None does not depend on ``x``. Parts of a row cannot have their own outer scales
        (`QParams.outer_scale`). Arguments are as in `find_qparams`.
        """

    @abstractmethod
    def scales_from_ranges(self, low: Tensor, high: Tensor, outer: Tensor | None, *, observed: bool = False) -> QParams:
        """Return scales and zero points of the stored level, as in `QParams`, for ranges of a weight.

        Args:
            low: Lower ends of the ranges, float32, of any shape, in units of the weight, not of ``outer``.
            high: Upper ends, likewise.
            outer: The `outer_scale`, broadcast over ``low``.
            observed: Whether the ends are values of the weight, so that an earlier level rounds them first;
                if not, a search chose them.
        """

    @abstractmethod
    def find_qparams(self, x: Tensor, shared: Observer | None = None) -> QParams:
        """Return scales of ``x`` itself, by the spec's observer.

        Args:
            x: The tensor.
            shared: An `observer` of several tensors, including ``x``, that share the scale of a whole tensor.
        """

    def fake_quantize(self, x: Tensor, qparams: QParams | None = None, *, out: Tensor | None = None) -> Tensor:
        """Return ``dequantize(quantize(x))`` in ``x``'s dtype, in few passes.

        If ``qparams`` is None, scales are found from ``x``. ``out`` may be ``x`` itself.
        """
        if qparams is None:
            return self.round_to_nearest(x, out=out)[0]
        values = self.dequantize(self.quantize(x, qparams), qparams)
        return cast_finite(values, x.dtype) if out is None else out.copy_(cast_finite(values, out.dtype))

    def round_to_nearest(self, x: Tensor, *, out: Tensor | None = None) -> tuple[Tensor, QParams]:
        """Find scales of ``x`` and round it; return its values and scales. ``out`` may be ``x``."""
        qparams = self.find_qparams(x)
        return self.fake_quantize(x, qparams, out=out), qparams

    @abstractmethod
    def quantize(self, x: Tensor, qparams: QParams) -> Tensor:
        """Return the codes of ``x``, in its shape."""

    def codes_of(self, values: Tensor, qparams: QParams) -> Tensor:
        """Return the codes of values from `fake_quantize` with the same ``qparams``: undo `dequantize`."""
        return self.quantize(values, qparams)

    def recovers_codes(self, dtype: torch.dtype, qparams: QParams) -> bool:
        """Return whether rounded values in that dtype give the same codes as the float values.

        If so, codes of a float tensor can be stored without its rounded values.
        """
        return False

    @abstractmethod
    def dequantize(self, codes: Tensor, qparams: QParams) -> Tensor:
        """Return float32 values of codes."""

    def dequantize_to(self, codes: Tensor, qparams: QParams, out: Tensor) -> None:
        """Write the values of codes to ``out``, of their shape and any floating dtype.

        These are the values of `dequantize`, in that dtype as `quark.numbers.cast_finite` casts them.
        """
        out.copy_(cast_finite(self.dequantize(codes, qparams), out.dtype))

    def pack(self, codes: Tensor, qparams: QParams, *, order: str = "reorder") -> dict[str, Tensor]:
        """Return checkpoint tensors by suffix; also for meta tensors.

        ``""`` is the codes; the others are ``scale``, ``zero_point``, ``scale_2``, ….
        """
        packing = self.stored_level.format.packing
        return {"": packing.pack(codes, self.granularity, order), **self.pack_qparams(qparams, order=order)}

    @abstractmethod
    def pack_qparams(self, qparams: QParams, *, order: str = "reorder") -> dict[str, Tensor]:
        """Return the tensors of `pack` without the codes, as stored for a static activation quantizer."""

    def unpack(self, tensors: dict[str, Tensor], shape: tuple[int, ...], *, order: str = "reorder") -> tuple[Tensor, QParams]:
        """Undo `pack` for a tensor of that shape."""
        codes = self.stored_level.format.packing.unpack(tensors[""], self.granularity, order, shape)
        return codes, self.unpack_qparams(tensors, shape, order=order)

    @abstractmethod
    def unpack_qparams(self, tensors: dict[str, Tensor], shape: tuple[int, ...], *, order: str = "reorder") -> QParams:
        """Undo `pack_qparams`."""

    @abstractmethod
    def empty_qparams(self, shape: tuple[int, ...], device: str) -> QParams:
        """Return scales of the right shapes and dtypes with arbitrary values, for meta models and readers."""

    def empty_codes(self, shape: tuple[int, ...]) -> tuple[Tensor, QParams]:
        """Return codes and scales of a tensor of that shape, on the meta device."""
        qparams = self.empty_qparams(shape, "meta")
        return self.quantize(torch.empty(shape, dtype=torch.float32, device="meta"), qparams), qparams
