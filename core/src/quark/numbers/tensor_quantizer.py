"""`TensorQuantizer` is the base class of all quantizers of tensors.

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
    """Base class of quantizers. Modules, algorithms and checkpoints quantize tensors through its methods.

    A new kind of quantizer derives from this class and defines the abstract methods. For example, it has
    several levels or its own scale structure. A quantizer can have one outer scale for the whole tensor, or
    one for each row of a weight. A number format returns its quantizer from
    `quark.numbers.NumberFormat.quantizer`.
    """

    @property
    @abstractmethod
    def levels(self) -> tuple[SingleLevelQuantizer, ...]:
        """The quantizers of the levels, in the order of the spec. Each level has its own scales."""

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
        """The granularity of the stored level. It says which elements share a scale."""
        return self.stored_level.granularity

    @property
    def is_dynamic(self) -> bool:
        """Whether the ranges are computed at run time."""
        return bool(self.levels[0].spec.is_dynamic)

    @property
    def is_float(self) -> bool:
        """Whether this quantizer only casts to another dtype, such as float16 or bfloat16."""
        return False

    @property
    def has_tensor_scale(self) -> bool:
        """Whether the whole tensor has one scale or one outer scale.

        The layers of an input group may share this scale.
        """
        return False

    @property
    def has_one_product(self) -> bool:
        """Whether a value is the single product ``(code − zero_point) · scale``.

        With two scales or an offset, for instance, a value is not a single product. The last bit of the value
        then depends on the order of the operations, so `WeightGrid` computes the values from codes.
        """
        return False

    @abstractmethod
    def shape_error(self, shape: tuple[int, ...]) -> str | None:
        """Return None if a tensor with shape ``shape`` can be quantized. Otherwise return an error message
        that says why not, and what to change."""

    @abstractmethod
    def observer(self) -> Observer:
        """Return a new observer for calibration."""

    @abstractmethod
    def qparams_from(self, observer: Observer) -> QParams:
        """Return the scales for the ranges that ``observer`` has computed."""

    @abstractmethod
    def outer_scale(self, x: Tensor, shared: Observer | None = None) -> Tensor | None:
        """Return the scale that multiplies the scales of the stored level, or None if there is no such scale.

        The shape is ``[]``, or ``[O]`` if each row of a weight ``[O, I]`` has an outer scale. Parts of a row
        cannot have their own outer scales (`QParams.outer_scale`). Whether the result is None must not depend
        on ``x``. `find_qparams` documents the arguments.
        """

    @abstractmethod
    def scales_from_ranges(self, low: Tensor, high: Tensor, outer: Tensor | None, *, observed: bool = False) -> QParams:
        """Return the scales and zero points of the stored level for ranges of a weight.

        Args:
            low: The lower ends of the ranges, as a float32 tensor of any shape. They are in the units of the
                weight, so they are not divided by ``outer``.
            high: The upper ends of the ranges, in the same form as ``low``.
            outer: The result of `outer_scale`, in a shape that can be broadcast over ``low``.
            observed: Whether the ends are values of the weight. If they are, an earlier level rounds them
                first. If they are not, a search has chosen the ends.
        """

    @abstractmethod
    def find_qparams(self, x: Tensor, shared: Observer | None = None) -> QParams:
        """Return the scales of ``x``. The observer of the spec computes them from ``x``.

        Args:
            x: The tensor.
            shared: An `observer` that has observed several tensors, including ``x``. These tensors share the
                scale that spans a whole tensor.
        """

    def fake_quantize(self, x: Tensor, qparams: QParams | None = None, *, out: Tensor | None = None) -> Tensor:
        """Return ``dequantize(quantize(x))`` in the dtype of ``x``.

        If ``qparams`` is None, the scales are computed from ``x``. ``out`` may be ``x`` itself.
        """
        if qparams is None:
            return self.round_to_nearest(x, out=out)[0]
        values = self.dequantize(self.quantize(x, qparams), qparams)
        return cast_finite(values, x.dtype) if out is None else out.copy_(cast_finite(values, out.dtype))

    def round_to_nearest(self, x: Tensor, *, out: Tensor | None = None) -> tuple[Tensor, QParams]:
        """Compute the scales of ``x``, round ``x``, and return the rounded values and the scales.

        ``out`` may be ``x``.
        """
        qparams = self.find_qparams(x)
        return self.fake_quantize(x, qparams, out=out), qparams

    @abstractmethod
    def quantize(self, x: Tensor, qparams: QParams) -> Tensor:
        """Return the codes of ``x``. They have the shape of ``x``."""

    def codes_of(self, values: Tensor, qparams: QParams) -> Tensor:
        """Undo `dequantize`: return the codes of values that `fake_quantize` returned with the same
        ``qparams``."""
        return self.quantize(values, qparams)

    def recovers_codes(self, dtype: torch.dtype, qparams: QParams) -> bool:
        """Return whether rounded values that are cast to ``dtype`` have the same codes as the float values.

        If they do, quark can compute and store the codes of a float tensor without computing rounded values.
        """
        return False

    @abstractmethod
    def dequantize(self, codes: Tensor, qparams: QParams) -> Tensor:
        """Return the float32 values of ``codes``."""

    def dequantize_to(self, codes: Tensor, qparams: QParams, out: Tensor) -> None:
        """Write the values of ``codes`` to ``out``, which has the same shape and any floating-point dtype.

        The values are those that `dequantize` returns, cast to the dtype of ``out`` by
        `quark.numbers.cast_finite`.
        """
        out.copy_(cast_finite(self.dequantize(codes, qparams), out.dtype))

    def pack(self, codes: Tensor, qparams: QParams, *, order: str = "reorder") -> dict[str, Tensor]:
        """Return the tensors that a checkpoint stores, as a dictionary from suffix to tensor.

        The suffix of the codes is ``""``. The other suffixes are ``scale``, ``zero_point``, ``scale_2`` and
        so on. The arguments may be meta tensors.
        """
        packing = self.stored_level.format.packing
        return {"": packing.pack(codes, self.granularity, order), **self.pack_qparams(qparams, order=order)}

    @abstractmethod
    def pack_qparams(self, qparams: QParams, *, order: str = "reorder") -> dict[str, Tensor]:
        """Return the tensors that `pack` returns, without the codes.

        For a static activation quantizer, a checkpoint stores these tensors.
        """

    def unpack(self, tensors: dict[str, Tensor], shape: tuple[int, ...], *, order: str = "reorder") -> tuple[Tensor, QParams]:
        """Undo `pack`: return the codes and the scales of a tensor with shape ``shape``."""
        codes = self.stored_level.format.packing.unpack(tensors[""], self.granularity, order, shape)
        return codes, self.unpack_qparams(tensors, shape, order=order)

    @abstractmethod
    def unpack_qparams(self, tensors: dict[str, Tensor], shape: tuple[int, ...], *, order: str = "reorder") -> QParams:
        """Undo `pack_qparams`: return the scales of a tensor with shape ``shape``."""

    @abstractmethod
    def empty_qparams(self, shape: tuple[int, ...], device: str) -> QParams:
        """Return scales with the right shapes and dtypes but arbitrary values.

        Meta models and checkpoint readers use these scales.
        """

    def empty_codes(self, shape: tuple[int, ...]) -> tuple[Tensor, QParams]:
        """Return codes and scales of a tensor with shape ``shape``, all on the meta device."""
        qparams = self.empty_qparams(shape, "meta")
        return self.quantize(torch.empty(shape, dtype=torch.float32, device="meta"), qparams), qparams
