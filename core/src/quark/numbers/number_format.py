"""`NumberFormat` defines which values an element can have, which codes stand for these values, and which
scales fit a range of values.

No code branches on the name of a format. It calls the format's methods instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from quark.base.scalars import divided
from quark.config.enums import RoundType, ScaleType
from quark.config.layer import TensorSpec
from quark.config.tensor import QTensorConfig
from quark.numbers.granularity import Granularity, granularity_of
from quark.numbers.kernels import DeviceCode

if TYPE_CHECKING:
    from quark.numbers.tensor_quantizer import TensorQuantizer


@attrs.frozen(eq=False)
class QParams:
    """The scales of a tensor, and its zero points if the format has zero points.

    An element's value is ``(code − zero_point) · scale · outer_scale``.

    Attributes:
        scale: The floating-point factors of the codes. The shape is ``[]`` per tensor, ``[C]`` per channel,
            ``[…, groups]`` per group, and ``[…]`` per token.
        zero_point: The zero points, in the shape of ``scale``. The dtype is int32 for integer zero points and
            float32 for real ones. It is None for formats without zero points.
        outer_scale: The float32 scale of the scales, or None. The shape is ``[]`` for one scale of the whole
            tensor, and ``[O]`` for one scale for each row of a weight ``[O, I]``. Other shapes are not
            supported, such as one scale for each super-block of a row. The reason is that
            `quark.numbers.WeightGrid` computes the scales of one group of columns without the other groups.
        table: The float32 table, such as a codebook, that the format has learned for the whole tensor. All
            rows use it. Its shape is the format's ``table_shape``, and its values may be negative. It is None
            for formats without a table.
    """

    scale: Tensor
    zero_point: Tensor | None = None
    outer_scale: Tensor | None = None
    table: Tensor | None = None

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the pair ``(field name, tensor)`` of each field that is not None."""
        for name in ("scale", "zero_point", "outer_scale", "table"):
            if (value := getattr(self, name)) is not None:
                yield name, value

    def map(self, change: Callable[[Tensor], Tensor]) -> QParams:
        """Return a copy in which ``change`` is applied to every tensor."""
        return attrs.evolve(self, **{name: change(value) for name, value in self.items()})


class Packing:
    """How a checkpoint stores codes and scales. This base class stores codes and scales unchanged.

    A number format that stores them in another form sets its ``packing`` to an instance of a subclass.

    All methods must work on meta tensors, because the shapes of a checkpoint are computed without data. So no
    operation may depend on values. Several threads call the methods, for different tensors.
    ``unpack(pack(codes))`` equals ``codes`` and ``unpack_qparams(pack_qparams(qparams))`` equals ``qparams``,
    to the bit.
    """

    def pack(self, codes: Tensor, granularity: Granularity, order: str) -> Tensor:
        """Return the codes in the form that a checkpoint stores.

        Args:
            codes: The codes ``[O, I]``, or codes of any other shape, in the format's ``storage_dtype``.
            granularity: The rule that says which elements share a scale.
            order: The order of the codes within a word, ``"reorder"`` or ``"order"``. Formats that have only
                one order ignore this argument.
        """
        return codes

    def unpack(self, packed: Tensor, granularity: Granularity, order: str, shape: tuple[int, ...]) -> Tensor:
        """Undo `pack`: return codes of the shape ``shape``."""
        return packed

    def pack_qparams(self, qparams: QParams, spec: QTensorConfig, granularity: Granularity, order: str) -> dict[str, Tensor]:
        """Return the tensors to store, as a dictionary. The default has the keys ``scale``, ``zero_point``
        and ``table``, except those of absent tensors."""
        return {name: tensor for name, tensor in qparams.items() if name != "outer_scale"}

    def unpack_qparams(
        self, tensors: dict[str, Tensor], spec: QTensorConfig, granularity: Granularity, order: str, shape: tuple[int, ...]
    ) -> QParams:
        """Undo `pack_qparams` for a tensor whose shape is ``shape``."""
        return QParams(tensors["scale"], tensors.get("zero_point"), table=tensors.get("table"))


AS_THEY_ARE = Packing()
"""The packing of formats that define no packing of their own."""


_SMALLEST_NORMAL = float(torch.finfo(torch.float32).tiny)
"""Smallest normal number of float32.

`NumberFormat.qparams` returns no smaller scale, because the scale of a group of zeros must not be 0.
"""


@attrs.frozen
class Spacing:
    """Distances between the values of a format, in units of the scale.

    Attributes:
        smallest: The smallest distance between two neighbouring values.
        largest: A magnitude that no rounded value exceeds, whether the value saturates or not.
        steps: The largest result of dividing a value's magnitude by the distance from this value to the next
            smaller magnitude.
    """

    smallest: float
    largest: float
    steps: int


class NumberFormat(ABC):
    """Base class of number formats. The core defines no format. Plugins register instances of subclasses.

    A format must define four methods: `max_magnitude`, `round_`, `encode` and `decode`. The defaults of the
    other methods are for formats that have float32 scales and no zero points, and that store codes unchanged.

    The engine (`quark.numbers.single_level`) divides by the scale. The methods of this class work on *scaled*
    values ``t = x / scale``. Several threads call the methods, on different parts of a tensor.

    Attributes:
        name: The registered name.
        bits: The number of bits of one stored element.
        storage_dtype: The torch dtype of unpacked codes.
        is_cast: Whether the format has no scales and only casts values to ``storage_dtype``.
        default_observer: The public name of the observer that is used if a spec names no observer.
        packing: How a checkpoint stores codes and scales.
        vector: The number of neighbouring elements that one code describes and that are rounded together. If
            it is larger than 1, the last axis of each argument contains whole vectors, and each element
            stores a part of the bits of the code. If it is 1, each element is rounded by itself.
        table_shape: The shape of the table that the format learns for each weight (`learned_table`), or None
            if the format has no table.
    """

    name: str
    bits: float
    storage_dtype: torch.dtype
    is_cast: bool = False
    default_observer: str = "MinMaxObserver"
    packing: Packing = AS_THEY_ARE
    vector: int = 1
    table_shape: tuple[int, ...] | None = None

    @abstractmethod
    def max_magnitude(self, spec: QTensorConfig) -> float:
        """Return the largest representable magnitude in units of the scale: 448 for E4M3, 7.5 for INT4.

        To get the ideal symmetric scale of a range, divide the largest magnitude in the range by the result.
        """

    @abstractmethod
    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        """Round scaled float32 values in place to the nearest representable values, and return ``t``.

        Ties go to the value with the even code. Values beyond the largest representable magnitude saturate,
        and NaN stays NaN. If neighbouring elements of the format share bits, they are neighbours along the
        last axis. This axis contains whole groups of the spec's granularity. ``zero`` is None for formats
        without zero points. Otherwise it contains integer (int32) or real (float) zero points. They are
        broadcast over ``t`` and added to it. They are not subtracted from the result.
        """

    @abstractmethod
    def encode(self, t: Tensor) -> Tensor:
        """Return the codes of values that `round_` returned. The codes have the dtype ``storage_dtype``."""

    @abstractmethod
    def decode(self, codes: Tensor) -> Tensor:
        """Undo `encode`: return the float32 values of codes.

        Every code of ``bits`` bits must have a value, because a damaged file may contain any code.
        """

    def codes(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        """Return the codes of scaled values, computed with `round_` and then `encode`.

        This method may overwrite ``t``. A format overrides the method if it can round and encode in one step.
        """
        return self.encode(self.round_(t, zero))

    def write_codes(self, t: Tensor, zero: Tensor | None, out: Tensor) -> None:
        """Write the result of `codes` to ``out``, which has the shape of ``t`` and the dtype
        ``storage_dtype``.

        A format overrides this method if that saves a pass over the tensor.
        """
        out.copy_(self.codes(t, zero))

    def writes_codes_of(self, dtype: torch.dtype) -> bool:
        """Return whether `write_codes` accepts scaled values whose dtype is ``dtype``, and writes the same
        codes as it does for float32 values."""
        return dtype is torch.float32

    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        """Return the scales and zero points for float32 ranges ``[low, high]``.

        The scales and zero points have the shape of ``low``.
        """
        return QParams(divided(torch.maximum(-low, high), self.max_magnitude(spec)).clamp_(min=_SMALLEST_NORMAL))

    def spec_error(self, spec: QTensorConfig) -> str | None:
        """Return an error message if a field of this spec is missing or contradicts another field. Return
        None if the spec is valid. A message says what to change.

        The default method is for formats that have float32 scales and no zero points, and that round to the
        nearest value.
        """
        missing = [name for name in ("is_dynamic", "qscheme") if getattr(spec, name) is None]
        if missing:
            return f"{self.name} needs {' and '.join(missing)}. Set every field that is named here"
        if spec.symmetric is False:
            return f"{self.name} has no zero point. Set symmetric to True or None"
        if spec.scale_format not in (None, "float32") or spec.scale_type not in (None, ScaleType.float, ScaleType.float32):
            return f"{self.name} always has float32 scales. Leave out scale_format and scale_type"
        if spec.scale_calculation_mode is not None:
            return f"{self.name} computes its scales in one way only. Leave out scale_calculation_mode"
        if spec.round_method not in (None, RoundType.half_even):
            return f"{self.name} rounds to the nearest value only. Leave out round_method"
        return None

    def canonicalize(self, spec: QTensorConfig) -> TensorSpec:
        """Return the spec with implied fields filled in and old spellings replaced.

        The result may have another number format, or several levels. It is not canonicalized again.
        """
        return spec

    def for_spec(self, spec: QTensorConfig) -> NumberFormat:
        """Return this format, or another format if the canonical spec has a rounding method that needs
        another format."""
        return self

    def quantizer(self, levels: tuple[QTensorConfig, ...], *, activation: bool) -> TensorQuantizer | None:
        """Return the quantizer of a tensor if this format has its own scale structure.

        If the result is None, the core chooses the quantizer.

        Args:
            levels: The canonical spec of the tensor. At least one of its levels has this format.
            activation: Whether the tensor is an activation.
        """
        return None

    def granularity(self, spec: QTensorConfig, *, activation: bool) -> Granularity:
        """Return the granularity of a spec. The default is the result of `granularity_of`.

        A format may define its own qschemes. The name of such a qscheme starts with the vendor's prefix, for
        example ``"acme.diagonal"``. The format reads the size of the groups from the spec's ``group_size``
        or ``block_size``.

        Args:
            spec: The canonical spec of one level.
            activation: Whether the tensor is an activation.

        Raises:
            ConfigError: The format does not support the qscheme of the spec.
        """
        return granularity_of(spec, activation=activation)

    def by_reciprocal(self, spec: QTensorConfig) -> bool:
        """Return whether scaled values are ``x · (1 / scale)``.

        Otherwise they are ``x / scale``, which is slower. The two results can differ in the last bit, so a
        value near the midpoint of two representable values can get another code. Each family of formats
        follows its reference implementation. If scales are powers of two, the two results are equal.
        """
        return False

    def spacing(self, spec: QTensorConfig) -> Spacing | None:
        """Return the spacing of the representable values, or None if it is unknown.

        quark uses the spacing to compute whether values that are cast to 16 bits still have the same codes.
        If the spacing is unknown, quark always computes the stored codes from rounded values. This takes
        twice as long.
        """
        return None

    def device_code(self, spec: QTensorConfig) -> DeviceCode | None:
        """Return the arithmetic of this format as Triton functions for kernels.

        If the result is None, torch operations round. quark calls this method only if it uses kernels, so
        Triton is imported only in that case. ``spec`` is canonical and has one level.
        """
        return None

    def learned_table(self, t: Tensor, importance: Tensor) -> Tensor:
        """Return the float32 table for a weight, in the shape `table_shape`.

        Formats with a table must define this method.
        The same arguments must give the same table.

        Args:
            t: The float32 weight ``[O, I]`` divided by its scales. The method must not change it.
            importance: The weight of each element's squared error, in the shape of ``t``. It is ``(scale /
                largest scale)²``, multiplied by the second moment of the input channel if that is known.
        """
        raise NotImplementedError(f"the format '{self.name}' sets table_shape, but has no learned_table. Define this method")

    def with_table(self, table: Tensor) -> NumberFormat:
        """Return a format whose values come from ``table``. Formats with a table must define this method.

        Without a table, the format cannot represent any values. So quark calls `round_`, `encode` and
        `decode` only on the format that this method returns.
        """
        raise NotImplementedError(f"the format '{self.name}' sets table_shape, but has no with_table. Define this method")

    def round_in_(self, t: Tensor, metric: Tensor) -> Tensor:
        """Round vectors ``t [n, vector]`` in place, and return ``t``.

        Choose values such that the rounding errors e of each vector minimize ``e M eᵀ``, where M is
        ``metric``. Algorithms that compensate rounding errors in other columns call this method. The default
        ignores ``metric`` and calls `round_`.

        Args:
            t: The scaled float32 values.
            metric: A symmetric and positive definite matrix ``[vector, vector]``.
        """
        return self.round_(t)

    def subscales(self, t: Tensor) -> Tensor | None:
        """Return one factor for each scaled value in ``t``, or None if the format has no such factors.

        A factor refines the scale of its value. The format stores the factors in the bits that neighbouring
        elements share. If the scales are multiplied by the factors, `element_format` rounds each element
        independently of its neighbours.
        """
        return None

    def element_format(self) -> NumberFormat:
        """Return the format that rounds an element if the scale includes the factor from `subscales`.

        The default is this format.
        """
        return self
