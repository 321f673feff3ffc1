"""`ViewedQuantizer` quantizes a tensor through a view. The view moves the channels to the axis at which
quantizers expect them.

Quantizers expect the output channels of a weight on its first axis, and the input channels of a weight and
the features of an activation on the last axis. A convolution has its channels on other axes. The layer type
of the convolution describes this with a `TensorView`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import attrs
import torch
from torch import Tensor

from quark.numbers.granularity import Granularity
from quark.numbers.number_format import QParams
from quark.numbers.observer import Observer
from quark.numbers.tensor_quantizer import TensorQuantizer

if TYPE_CHECKING:
    from quark.numbers.single_level import SingleLevelQuantizer


class TensorView(Protocol):
    """A rearrangement of the elements of a tensor that can be undone.

    Two views that do the same compare equal and have the same hash.
    """

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that a tensor of shape ``shape`` has after it is rearranged."""

    def arranged(self, x: Tensor) -> Tensor:
        """Return the elements of ``x`` in this arrangement. The result is a view or a copy of ``x``."""

    def restored(self, arranged: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Undo `arranged`: return the elements as a tensor whose shape is ``shape``."""

    def error(self, granularity: Granularity) -> str | None:
        """Return None if scales of ``granularity`` fit this arrangement. Otherwise return an error message
        that says why not, and what to change."""


def output_first_shape(shape: tuple[int, ...], groups: int = 1) -> tuple[int, ...]:
    """Convert the shape ``[in, out / groups, …]`` of a weight to the shape ``[out, in / groups, …]``.

    A second call converts the shape back.

    >>> output_first_shape((8, 6, 3, 3), groups=2)
    (12, 4, 3, 3)
    """
    return (shape[1] * groups, shape[0] // groups, *shape[2:])


@attrs.frozen
class KernelMatrix:
    """The weight of a convolution as the matrix ``[out, kernel positions · in / groups]``.

    A row is an output channel. Within a row, the input channels of one kernel position are adjacent. So a
    group that shares a scale contains input channels of only one kernel position if the group size divides
    their number.

    Attributes:
        is_transposed: Whether the weight is ``[in, out / groups, *kernel]`` instead of
            ``[out, in / groups, *kernel]``.
        groups: The number of groups of the convolution.
    """

    is_transposed: bool = False
    groups: int = 1

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        rows, columns, *kernel = self._output_first(shape)
        return (rows, columns * torch.Size(kernel).numel())

    def arranged(self, x: Tensor) -> Tensor:
        weight = _exchanged(x, self.groups) if self.is_transposed else x
        return weight.movedim(1, -1).flatten(1)

    def restored(self, arranged: Tensor, shape: tuple[int, ...]) -> Tensor:
        rows, columns, *kernel = self._output_first(shape)
        weight = arranged.reshape(rows, *kernel, columns).movedim(-1, 1)
        return _exchanged(weight, self.groups) if self.is_transposed else weight

    def error(self, granularity: Granularity) -> str | None:
        if granularity.scale_shape((1, 2)) == (2,):
            return (
                "has scales per input channel. The weight of a convolution has its output channels on axis 0, also if the convolution is "
                "transposed: use ch_axis=0"
            )
        return None

    def _output_first(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return output_first_shape(shape, self.groups) if self.is_transposed else shape


def _exchanged(weight: Tensor, groups: int) -> Tensor:
    """Rearrange a weight of shape ``[in, out / groups, …]`` to the shape ``[out, in / groups, …]``, or back.

    The result is a view if there is one group. Otherwise it is a copy.
    """
    if groups == 1:
        return weight.transpose(0, 1)
    return weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)


@attrs.frozen
class ChannelsLast:
    """Moves the channels to the last axis. The tensor ``[batch, channels, …]`` is the input or the output of
    a convolution.

    Attributes:
        axis: The axis of the channels. It is negative, because a tensor may have no batch axis.
    """

    axis: int

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        axis = self.axis % len(shape)
        return (*shape[:axis], *shape[axis + 1 :], shape[axis])

    def arranged(self, x: Tensor) -> Tensor:
        return x.movedim(self.axis, -1).contiguous()

    def restored(self, arranged: Tensor, shape: tuple[int, ...]) -> Tensor:
        return arranged.movedim(-1, self.axis)

    def error(self, granularity: Granularity) -> str | None:
        return None


def viewed(quantizer: TensorQuantizer, view: TensorView) -> TensorQuantizer:
    """Return a quantizer that rearranges a tensor with ``view`` before it applies ``quantizer``.

    If ``quantizer`` only casts, return it unchanged.
    """
    return quantizer if quantizer.is_float else _viewed(quantizer, view)  # type: ignore[arg-type]  # quantizers are hashed by identity


# Cached like quantizers of equal specs, so that equal layers share caches by quantizer.
@lru_cache(maxsize=1024)
def _viewed(quantizer: TensorQuantizer, view: TensorView) -> TensorQuantizer:
    return ViewedQuantizer(quantizer, view)


@attrs.frozen(eq=False)
class ViewedQuantizer(TensorQuantizer):
    """A quantizer that rearranges a tensor before it quantizes the elements.

    `quark.numbers.TensorQuantizer` documents the methods.

    Scales have the shapes of the rearranged tensor's scales. Stored codes have the shape of the original
    tensor if they are not packed and if there is one scale for the tensor or for each channel. Packed codes,
    and codes with scales of groups, have the shape of the rearranged tensor.

    Attributes:
        inner: The quantizer of the arranged tensors.
        view: The arrangement of the elements.
    """

    inner: TensorQuantizer
    view: TensorView

    @property
    def levels(self) -> tuple[SingleLevelQuantizer, ...]:
        return self.inner.levels

    @property
    def stored_level(self) -> SingleLevelQuantizer:
        return self.inner.stored_level

    @property
    def has_tensor_scale(self) -> bool:
        return self.inner.has_tensor_scale

    @property
    def has_one_product(self) -> bool:
        return self.inner.has_one_product

    def shape_error(self, shape: tuple[int, ...]) -> str | None:
        return self.inner.shape_error(self.view.shape(shape)) or self.view.error(self.granularity)

    def observer(self) -> Observer:
        return _ViewedObserver(self.inner.observer(), self.view)

    def qparams_from(self, observer: Observer) -> QParams:
        return self.inner.qparams_from(_inner(observer))

    def outer_scale(self, x: Tensor, shared: Observer | None = None) -> Tensor | None:
        return self.inner.outer_scale(self.view.arranged(x), None if shared is None else _inner(shared))

    def scales_from_ranges(self, low: Tensor, high: Tensor, outer: Tensor | None, *, observed: bool = False) -> QParams:
        return self.inner.scales_from_ranges(low, high, outer, observed=observed)

    def find_qparams(self, x: Tensor, shared: Observer | None = None) -> QParams:
        return self.inner.find_qparams(self.view.arranged(x), None if shared is None else _inner(shared))

    def fake_quantize(self, x: Tensor, qparams: QParams | None = None, *, out: Tensor | None = None) -> Tensor:
        return self._restored(self.inner.fake_quantize(self.view.arranged(x), qparams), x, out)

    def round_to_nearest(self, x: Tensor, *, out: Tensor | None = None) -> tuple[Tensor, QParams]:
        values, qparams = self.inner.round_to_nearest(self.view.arranged(x))
        return self._restored(values, x, out), qparams

    def quantize(self, x: Tensor, qparams: QParams) -> Tensor:
        return self._restored(self.inner.quantize(self.view.arranged(x), qparams), x)

    def codes_of(self, values: Tensor, qparams: QParams) -> Tensor:
        return self._restored(self.inner.codes_of(self.view.arranged(values), qparams), values)

    def recovers_codes(self, dtype: torch.dtype, qparams: QParams) -> bool:
        return self.inner.recovers_codes(dtype, qparams)

    def dequantize(self, codes: Tensor, qparams: QParams) -> Tensor:
        return self._restored(self.inner.dequantize(self.view.arranged(codes), qparams), codes)

    def pack(self, codes: Tensor, qparams: QParams, *, order: str = "reorder") -> dict[str, Tensor]:
        arranged = self.view.arranged(codes)
        tensors = self.inner.pack(arranged, qparams, order=order)
        if self._keeps_shape(tensors[""], tuple(arranged.shape)):
            tensors[""] = self.view.restored(tensors[""], tuple(codes.shape)).contiguous()
        return tensors

    def pack_qparams(self, qparams: QParams, *, order: str = "reorder") -> dict[str, Tensor]:
        return self.inner.pack_qparams(qparams, order=order)

    def unpack(self, tensors: dict[str, Tensor], shape: tuple[int, ...], *, order: str = "reorder") -> tuple[Tensor, QParams]:
        stored, arranged = tensors[""], self.view.shape(shape)
        if stored.ndim == len(shape) and len(shape) != len(arranged):
            tensors = {**tensors, "": self.view.arranged(stored)}
        codes, qparams = self.inner.unpack(tensors, arranged, order=order)
        return self.view.restored(codes, shape).contiguous(), qparams

    def unpack_qparams(self, tensors: dict[str, Tensor], shape: tuple[int, ...], *, order: str = "reorder") -> QParams:
        return self.inner.unpack_qparams(tensors, self.view.shape(shape), order=order)

    def empty_qparams(self, shape: tuple[int, ...], device: str) -> QParams:
        return self.inner.empty_qparams(self.view.shape(shape), device)

    def _restored(self, arranged: Tensor, like: Tensor, out: Tensor | None = None) -> Tensor:
        result = self.view.restored(arranged, tuple(like.shape))
        return result.contiguous() if out is None else out.copy_(result)

    def _keeps_shape(self, packed: Tensor, arranged: tuple[int, ...]) -> bool:
        return tuple(packed.shape) == arranged and len(self.granularity.scale_shape(arranged)) < len(arranged)


class _ViewedObserver(Observer):
    """An observer that rearranges each tensor and passes the result to another observer."""

    def __init__(self, inner: Observer, view: TensorView) -> None:
        super().__init__(inner.spec, inner.granularity)
        self.inner = inner
        self._view = view

    def observe(self, x: Tensor) -> None:
        self.inner.observe(self._view.arranged(x))

    def range(self) -> tuple[Tensor, Tensor]:
        return self.inner.range()

    def merge(self, other: Observer) -> None:
        self.inner.merge(self.of_same_kind(other).inner)


def _inner(observer: Observer) -> Observer:
    return observer.inner if isinstance(observer, _ViewedObserver) else observer
