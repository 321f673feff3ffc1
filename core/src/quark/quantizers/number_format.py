"""NumberFormat: element codes ↔ values, range, rounding, packing. A format is a value, never a branch."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from quark.config.layer import TensorSpec
from quark.config.tensor import QTensorConfig
from quark.quantizers.granularity import Granularity
from quark.quantizers.qparams import QParams


class NumberFormat(ABC):
    """A number format. Implementations are frozen attrs values in plugins; the core knows none by name.

    The engine (`quark.quantizers.single_level`) works on *scaled* values ``t = x / scale``, and asks the format to round them.

    Attributes:
        name: Registered name.
        bits: Bits of one stored element.
        storage_dtype: Torch dtype of unpacked codes.
        is_cast: Whether the format has no scales: values are cast to ``storage_dtype`` and that is all.
        default_observer: Documented name of the observer of specs that name none.
    """

    name: str
    bits: float
    storage_dtype: torch.dtype
    is_cast: bool = False
    default_observer: str = "PlaceholderObserver"

    @abstractmethod
    def spec_error(self, spec: QTensorConfig) -> str | None:
        """What a spec of this format lacks or contradicts, with the cure; None where it is complete."""

    def canonicalize(self, spec: QTensorConfig) -> TensorSpec:
        """What a spec of this format means, spelled out: fields that the format implies are filled in, old spellings are replaced.

        The result may be of another format, or of several levels; its first stage is not canonicalized again.
        """
        return spec

    def for_spec(self, spec: QTensorConfig) -> NumberFormat:
        """This format as a canonical spec wants it, where it varies with anything but the scale (a rounding method)."""
        return self

    def by_reciprocal(self, spec: QTensorConfig) -> bool:
        """Whether scaled values are ``x · (1 / scale)`` rather than ``x / scale``, which takes longer.

        The two differ in the last bit, and so in the codes of values halfway between two: each family follows its reference. Where scales
        are powers of two they are the same.
        """
        return False

    @abstractmethod
    def max_magnitude(self, spec: QTensorConfig) -> float:
        """How many scales a range reaches on either side of 0: the ideal symmetric scale of a range is its largest magnitude ÷ this."""

    @abstractmethod
    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        """Scales, and zero points, for ranges ``[low, high]``, float32, of any shape; the shape is kept."""

    @abstractmethod
    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        """Round scaled float32 values in place to the nearest representable ones, ties to the even code, saturating; returns ``t``.

        NaN stays NaN. Formats in which neighbours share bits look at the last axis, which holds whole groups of the spec's granularity.
        A zero point (int32: whole; float: real), broadcast over ``t``, is added on the way; the result counts from it.
        """

    def subscales(self, t: Tensor) -> Tensor | None:
        """Factors by which neighbours that share bits make their scale finer, one for each of the scaled values ``t``; None for none.

        With them in its scale, an element is rounded by `alone`, whatever its neighbours are.
        """
        return None

    def element_format(self) -> NumberFormat:
        """The format of one element: this one, or where neighbours share bits, what those leave to it."""
        return self

    @abstractmethod
    def encode(self, t: Tensor) -> Tensor:
        """Codes, in ``storage_dtype``, of values that `round_` has left."""

    def codes(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        """Codes of scaled values: `round_`, then `encode`; formats may do both at once. ``t`` is not kept."""
        return self.encode(self.round_(t, zero))

    @abstractmethod
    def decode(self, codes: Tensor) -> Tensor:
        """The float32 values of codes; the inverse of `encode`."""

    @abstractmethod
    def pack(self, codes: Tensor, granularity: Granularity, order: str) -> Tensor:
        """Codes ``[O, I]`` as they lie in a checkpoint. Works on meta tensors, so that shapes are known without data."""

    @abstractmethod
    def unpack(self, packed: Tensor, granularity: Granularity, order: str, shape: tuple[int, ...]) -> Tensor:
        """The inverse of `pack`, bit for bit."""

    @abstractmethod
    def pack_qparams(self, qparams: QParams, spec: QTensorConfig, granularity: Granularity, order: str) -> dict[str, Tensor]:
        """Scales and zero points as they lie in a checkpoint, by suffix: ``scale``, ``zero_point``, ``scale_2``, …"""

    @abstractmethod
    def unpack_qparams(
        self, tensors: dict[str, Tensor], spec: QTensorConfig, granularity: Granularity, order: str, shape: tuple[int, ...]
    ) -> QParams:
        """The inverse of `pack_qparams`; ``shape`` is the tensor's."""
