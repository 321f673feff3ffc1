"""NumberFormat: the values that an element can have, their codes, and the scales of a range.

Code never branches on a format: it calls the format's methods.
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
    """Scales, and zero points of formats that have them.

    ``value = (code − zero_point) · scale · outer_scale``.

    Attributes:
        scale: Multiplier, float. ``[]`` per tensor, ``[C]`` per channel, ``[…, groups]`` per group, ``[…]``
            per token.
        zero_point: Tensor of the shape of ``scale``: int32 if integer, float32 if real; None for formats
            without zero points.
        outer_scale: Scale of the scales, float32: ``[]`` for the whole tensor, ``[O]`` for the rows of a
            weight ``[O, I]``, or None. No other shape is supported, such as one for each super-block of a
            row, because `quark.numbers.WeightGrid` finds the scales of single groups of columns.
        table: Table that the format has learned for the whole tensor, such as a codebook: float32, of any
            sign, with the format's ``table_shape``. All rows use it. None for formats without one.
    """

    scale: Tensor
    zero_point: Tensor | None = None
    outer_scale: Tensor | None = None
    table: Tensor | None = None

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that are not None, by field name."""
        for name in ("scale", "zero_point", "outer_scale", "table"):
            if (value := getattr(self, name)) is not None:
                yield name, value

    def map(self, change: Callable[[Tensor], Tensor]) -> QParams:
        """Return QParams with ``change`` applied to every tensor."""
        return attrs.evolve(self, **{name: change(value) for name, value in self.items()})


class Packing:
    """Stores codes and scales as they are.

    A number format with another storage has a subclass as its ``packing``.

    All methods must work on meta tensors, because the shapes of a checkpoint are found without data: no
    operation may use values. Several threads call them, for different tensors. ``unpack(pack(codes))`` equals
    ``codes`` and ``unpack_qparams(pack_qparams(qparams))`` equals ``qparams``, to the bit.
    """

    def pack(self, codes: Tensor, granularity: Granularity, order: str) -> Tensor:
        """Return codes in their stored form.

        Args:
            codes: ``[O, I]``, or of any other shape, in the format's ``storage_dtype``.
            granularity: Which elements share a scale.
            order: Order of codes in a word, for formats with two orders: ``"reorder"`` or ``"order"``.
        """
        return codes

    def unpack(self, packed: Tensor, granularity: Granularity, order: str, shape: tuple[int, ...]) -> Tensor:
        """Undo `pack`: return codes of that shape."""
        return packed

    def pack_qparams(self, qparams: QParams, spec: QTensorConfig, granularity: Granularity, order: str) -> dict[str, Tensor]:
        """Return stored scales, zero points and table, by suffix: ``scale``, ``zero_point``, ``table``."""
        return {name: tensor for name, tensor in qparams.items() if name != "outer_scale"}

    def unpack_qparams(
        self, tensors: dict[str, Tensor], spec: QTensorConfig, granularity: Granularity, order: str, shape: tuple[int, ...]
    ) -> QParams:
        """Undo `pack_qparams` for a tensor of that shape."""
        return QParams(tensors["scale"], tensors.get("zero_point"), table=tensors.get("table"))


AS_THEY_ARE = Packing()
"""The packing of formats that define none."""


_SMALLEST_NORMAL = float(torch.finfo(torch.float32).tiny)
"""Minimum scale that `NumberFormat.qparams` returns, float32's smallest normal number: the scale of a group
of zeros must not be 0.
"""


@attrs.frozen
class Spacing:
    """Distances between the values of a format, in units of the scale.

    Attributes:
        smallest: Smallest distance of two neighbours.
        largest: Magnitude that no rounded value exceeds, saturated or not.
        steps: Largest ratio of a value's magnitude and its distance to the next smaller value.
    """

    smallest: float
    largest: float
    steps: int


class NumberFormat(ABC):
    """A number format. The core knows no format by name; plugins register values of subclasses.

    A format must define four methods, `max_magnitude`, `round_`, `encode` and `decode`. The defaults of the
    other methods serve formats with a float32 scale, no zero point and codes that are stored as they are.

    The engine (`quark.numbers.single_level`) divides by the scale; the methods here work on *scaled* values
    ``t = x / scale``. Several threads call them, on different parts of a tensor.

    Attributes:
        name: Registered name.
        bits: Bits of one stored element.
        storage_dtype: Torch dtype of unpacked codes.
        is_cast: Whether the format has no scales, and values are only cast to ``storage_dtype``.
        default_observer: Public name of the observer for specs that name none.
        packing: Storage of codes and scales in a checkpoint.
        vector: Number of neighbouring elements that one code describes, and that are rounded together. The
            last axis of each argument then holds whole vectors, and each element stores a part of the bits of
            the code. With 1, elements are rounded one by one.
        table_shape: Shape of the table that the format learns for each weight (`learned_table`); None if it
            has none.
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

        The ideal symmetric scale of a range is its largest magnitude divided by this.
        """

    @abstractmethod
    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        """Round scaled float32 values in place to the nearest values, ties to even codes, saturating; return
        ``t``.

        NaN stays NaN. Formats in which neighbours share bits use the last axis, which holds whole groups of
        the spec's granularity. ``zero`` is None for formats without zero points. Otherwise it is broadcast
        over ``t`` and added (int32: integer; float: real), and the result includes it.
        """

    @abstractmethod
    def encode(self, t: Tensor) -> Tensor:
        """Return codes, in ``storage_dtype``, of values that `round_` returned."""

    @abstractmethod
    def decode(self, codes: Tensor) -> Tensor:
        """Return the float32 values of codes; the inverse of `encode`.

        Every code of ``bits`` bits has a value, since a damaged file may hold any.
        """

    def codes(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        """Return codes of scaled values: `round_`, then `encode`.

        It may overwrite ``t``. Formats override it if one step does both.
        """
        return self.encode(self.round_(t, zero))

    def write_codes(self, t: Tensor, zero: Tensor | None, out: Tensor) -> None:
        """Write `codes` to ``out``, of ``t``'s shape, in ``storage_dtype``.

        Formats override it if that saves a pass.
        """
        out.copy_(self.codes(t, zero))

    def writes_codes_of(self, dtype: torch.dtype) -> bool:
        """Return whether `write_codes` accepts scaled values in that dtype, and gives the same codes as for
        float32."""
        return dtype is torch.float32

    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        """Return scales, and zero points, of ranges ``[low, high]``, float32, in their shape."""
        return QParams(divided(torch.maximum(-low, high), self.max_magnitude(spec)).clamp_(min=_SMALLEST_NORMAL))

    def spec_error(self, spec: QTensorConfig) -> str | None:
        """Return the missing or contradictory field of a spec of this format, with the fix, or None.

        The default is for formats with the default scales: float32, without zero points, rounding to nearest.
        """
        missing = [name for name in ("is_dynamic", "qscheme") if getattr(spec, name) is None]
        if missing:
            return f"{self.name} needs {' and '.join(missing)}: set them"
        if spec.symmetric is False:
            return f"{self.name} has no zero point: set symmetric=True or None"
        if spec.scale_format not in (None, "float32") or spec.scale_type not in (None, ScaleType.float, ScaleType.float32):
            return f"{self.name} has float32 scales: leave out scale_format and scale_type"
        if spec.scale_calculation_mode is not None:
            return f"{self.name} computes its scales in one way only: leave out scale_calculation_mode"
        if spec.round_method not in (None, RoundType.half_even):
            return f"{self.name} rounds to the nearest value only: leave out round_method"
        return None

    def canonicalize(self, spec: QTensorConfig) -> TensorSpec:
        """Return the spec with implied fields filled in and old spellings replaced.

        The result may be of another format, or of several levels; it is not canonicalized again.
        """
        return spec

    def for_spec(self, spec: QTensorConfig) -> NumberFormat:
        """Return the format for a canonical spec: this one, or another if the rounding method needs it."""
        return self

    def quantizer(self, levels: tuple[QTensorConfig, ...], *, activation: bool) -> TensorQuantizer | None:
        """Return the quantizer of a tensor, for formats with their own scale structure.

        None leaves the choice to the core.

        Args:
            levels: The canonical spec of the tensor. At least one of its levels has this format.
            activation: Whether the tensor is an activation.
        """
        return None

    def granularity(self, spec: QTensorConfig, *, activation: bool) -> Granularity:
        """Return the granularity of a spec; by default that of `granularity_of`.

        A format may define its own qschemes. Such a qscheme has the vendor's prefix, ``"acme.diagonal"``, and
        takes its size from the spec's ``group_size`` or ``block_size``.

        Args:
            spec: The canonical spec of one level.
            activation: Whether the tensor is an activation.

        Raises:
            ConfigError: The format has no such qscheme.
        """
        return granularity_of(spec, activation=activation)

    def by_reciprocal(self, spec: QTensorConfig) -> bool:
        """Return whether scaled values are ``x · (1 / scale)`` rather than ``x / scale``, which takes longer.

        The two differ in the last bit, and so in the codes of values halfway between two others. Each family
        follows its reference. For power-of-two scales they are the same.
        """
        return False

    def spacing(self, spec: QTensorConfig) -> Spacing | None:
        """Return the spacing of the values, or None if unknown.

        With it, quark knows whether codes survive a cast of values to 16 bits. Without it, stored codes are
        always made from rounded values, which takes twice as long.
        """
        return None

    def device_code(self, spec: QTensorConfig) -> DeviceCode | None:
        """Return the arithmetic of this format as Triton functions for kernels; None leaves it to torch.

        Quark calls it only if it uses kernels, so that Triton is imported only then. ``spec`` is canonical
        and has one level.
        """
        return None

    def learned_table(self, t: Tensor, importance: Tensor) -> Tensor:
        """Return the table for a weight, of `table_shape`, float32. Formats with a table must define it.

        The same arguments give the same table.

        Args:
            t: The weight in units of its scales, ``[O, I]``, float32; not to be changed.
            importance: Factor of the squared error of each element, in the shape of ``t``:
                ``(scale / largest scale)²``, times the second moment of its input channel if known.
        """
        raise NotImplementedError(f"the format '{self.name}' sets table_shape, and has no learned_table")

    def with_table(self, table: Tensor) -> NumberFormat:
        """Return the format with the values of a table. Formats with a table must define it.

        The format without a table has no values. quark calls `round_`, `encode` and `decode` only on the
        result.
        """
        raise NotImplementedError(f"the format '{self.name}' sets table_shape, and has no with_table")

    def round_in_(self, t: Tensor, metric: Tensor) -> Tensor:
        """Round vectors ``t [n, vector]`` in place to minimize ``e M eᵀ`` of their errors e; return ``t``.

        Override it for roundings that compensate errors in other columns. The default is `round_`.

        Args:
            t: Scaled values, float32.
            metric: M ``[vector, vector]``, symmetric and positive definite.
        """
        return self.round_(t)

    def subscales(self, t: Tensor) -> Tensor | None:
        """Return a factor for each scaled value in ``t`` that refines its scale, or None.

        Bits that neighbours share hold these factors. If scales include the factors, `element_format` rounds
        each element independently of its neighbours.
        """
        return None

    def element_format(self) -> NumberFormat:
        """Return the format of one element with `subscales` in its scale; by default this format."""
        return self
