"""Statistics of layers' inputs: declared by an algorithm as ``needs``, collected once per input group."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import call
from typing import Any, ClassVar, Self, TypeVar, TypeVarTuple, cast

import torch
from torch import Tensor

from quark.base.parallel import coarsely, parallel_map, row_slices
from quark.base.ranks import Ranks
from quark.errors import PluginError

__all__ = ["AbsMax", "AbsMean", "CrossMoment", "Hessian", "Hessian64", "Statistic"]

_Arguments = TypeVarTuple("_Arguments")
_Value = TypeVar("_Value")

_STRIP = 128
"""Rows of a Hessian that are summed at a time, from the diagonal on: little more than half the product."""
_FEW_STRIPS = 4
"""Number of strips on devices that process one strip at a time: 5/8 of the full product."""
_WAITING = 2048
"""Tokens that are collected, on CPUs, before their products are added at once."""
_CONVERTED = 512
"""Tokens in 16 bits that are converted at a time, on CPUs: caches hold them until they are multiplied."""
_HALVES = (torch.float16, torch.bfloat16)
_PRECISION = threading.Lock()


class Statistic(ABC):
    """A sum over the input tokens of an input group.

    Two statistics can be merged; the result equals one statistic of both sets of tokens. So several processes
    can share the tokens: each has a statistic of its own, which is sent to the others with all its
    attributes.

    Args:
        columns: K, the layers' number of input channels.
        device: The device of the inputs.

    Attributes:
        wants_float: Whether the inputs in the float model are needed too, which doubles the forwards.
        one_in: Of how many tokens of a call one is enough, evenly spaced; a run leaves the others out.
        tokens: The number of tokens in the sum.
        inputs_last: Whether inputs stay as they are until the next `flush`, so that none has to be copied.

    Example:
        A custom statistic, the largest value of each channel::

            class Largest(Statistic):
                def __init__(self, columns, device):
                    super().__init__(columns, device)
                    self.value = torch.full((columns,), -torch.inf, device=device)

                def accumulate(self, x, reference):
                    self.value = torch.maximum(self.value, x.amax(0).float())

                def add(self, other):
                    self.value = torch.maximum(self.value, other.value)
    """

    wants_float: ClassVar[bool] = False
    one_in: ClassVar[int] = 1

    def __init__(self, columns: int, device: torch.device) -> None:
        self.columns = columns
        self.device = device
        self.tokens = 0
        self.inputs_last = False
        self._derived: dict[Hashable, Any] = {}

    def update(self, x: Tensor, reference: Tensor | None = None) -> None:
        """Add tokens to the statistic.

        Args:
            x: The layers' input in the quantized model, ``[tokens, K]``, in the model's dtype.
            reference: The layers' input in the float model, likewise; None if unknown or not wanted.

        Raises:
            PluginError: The statistic has changed ``x``.
        """
        self.tokens += x.shape[0]
        self._derived.clear()
        if x.shape[0]:
            version = x._version
            self.accumulate(x, reference)
            if x._version != version:
                raise PluginError(f"the statistic {type(self).__name__} changes its inputs in place, which layers have still to read")

    def merge(self, other: Self) -> None:
        """Add the tokens of another statistic of the same kind."""
        self.tokens += other.tokens
        self._derived.clear()
        self.add(other)

    def of_all_ranks(self, ranks: Ranks) -> Self:
        """Return the statistic of the tokens of all ranks, the same on each; this one is used up.

        By default the statistics of all ranks are merged in their order; a large sum has a faster way.
        """
        first, *others = ranks.gather(self)
        for other in others:
            first.merge(other)
        first.device = self.device
        return first

    def derived(self, compute: Callable[[Self, *_Arguments], _Value], *arguments: *_Arguments) -> _Value:
        """Return ``compute(self, *arguments)``, computed once for an input group until tokens are added.

        Args:
            compute: A function of a module: the value is kept for it and its arguments.
            arguments: What it takes beside the statistic; hashable.
        """
        key = (compute, arguments)
        if key not in self._derived:
            self._derived[key] = compute(self, *arguments)
        return cast(_Value, self._derived[key])

    @property
    def flops(self) -> int:
        """Least floating-point operations of the updates so far; 0 where moving the data takes longer."""
        return 0

    def flush(self) -> None:
        """Compute sums that updates have put off, so that the next use of them does not wait."""
        return

    @abstractmethod
    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        """Add at least one token; called by `update`, which counts tokens."""

    @abstractmethod
    def add(self, other: Self) -> None:
        """Add another statistic's sums; called by `merge`, which adds the token counts."""


class _Moment(Statistic):
    """A sum of products of channels, ``[K, K]``; the subclass defines the products."""

    master: ClassVar[torch.dtype] = torch.float32
    _is_symmetric: ClassVar[bool] = True

    def __init__(self, columns: int, device: torch.device) -> None:
        super().__init__(columns, device)
        self._products = _Products(columns, self.master, device, is_symmetric=self._is_symmetric)

    def matrix(self) -> Tensor:
        """Return the accumulated tensor itself, symmetric in a Hessian, which must not be changed."""
        return self._products.total()

    def flush(self) -> None:
        self._products.total()

    def _kept(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``x`` in a dtype, to be multiplied later; a copy where layers may change it before that."""
        with coarsely(x.numel(), x.device):
            return x.to(dtype, copy=x.device.type == "cpu" and not self.inputs_last)

    def add(self, other: Self) -> None:
        self._products.merge(other._products)

    def of_all_ranks(self, ranks: Ranks) -> Self:
        self.tokens = ranks.sum(self.tokens)
        self._products.sum_over(ranks)
        return self


class Hessian(_Moment):
    """The Hessian ``H = Σ x xᵀ [K, K]`` of the layer's input, an unnormalized sum in float32.

    H is the uncentred second moment of the input: the Hessian of the layer's squared output error up to a
    factor. Products of 16-bit inputs are exact in float32, in which they are summed.
    """

    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        x = self._kept(x, x.dtype if x.dtype in _HALVES else torch.float32)
        self._products.add(x, x)

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each token and each entry of H on and above its diagonal."""
        return self.tokens * self.columns * (self.columns + 1)

    def shrinkage(self) -> tuple[float, float]:
        """Return the Ledoit–Wolf shrinkage intensities of H, from 0 to 1.

        An intensity is the estimated variance of the entries, from the tokens' fourth moments, divided by
        their sum of squares. Shrinking by it minimizes the expected squared distance to the Hessian of
        infinitely many tokens. Source: Ledoit, Wolf, "A well-conditioned estimator for large-dimensional
        covariance matrices", 2004; here the diagonal and the rest have an intensity each.
        """
        if self.tokens < 2:
            return 1.0, 1.0
        h = self.matrix()
        diagonal = h.diagonal().double() / self.tokens
        squares = diagonal.square().sum()
        fourth, of_channels = torch.as_tensor(self._products.others) / self.tokens
        alive = diagonal > 0
        mean = torch.where(alive, diagonal, 0).sum() / alive.sum()
        spread = torch.where(alive, diagonal - mean, 0).square().sum()
        entries = torch.stack([(torch.linalg.matrix_norm(h).double() / self.tokens).square() - squares, spread])
        variance = torch.stack([fourth - of_channels - entries[0], of_channels - squares]) / (self.tokens - 1)
        shares = torch.where(entries > 0, variance.clamp(min=0) / entries, 1.0).clamp(max=1).nan_to_num(1.0)
        off_diagonal, along = shares.tolist()
        return off_diagonal, along


class Hessian64(Hessian):
    """`Hessian` with the sum over batches in float64."""

    master = torch.float64


class CrossMoment(_Moment):
    """The cross moment ``D = Σ (x_float − x) xᵀ [K, K]`` of the input error and the input, float32.

    Tokens without a known float input add nothing.
    """

    wants_float = True
    _is_symmetric = False

    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        if reference is not None:
            self._products.add(reference.float() - x.float(), self._kept(x, torch.float32))

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each token and each entry of D."""
        return 2 * self.tokens * self.columns**2


class AbsMax(Statistic):
    """The largest magnitude of each input channel, ``[K]``, float32."""

    def __init__(self, columns: int, device: torch.device) -> None:
        super().__init__(columns, device)
        self.value = torch.zeros(columns, dtype=torch.float32, device=device)

    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        self.value = torch.maximum(self.value, x.abs().amax(0).float())

    def add(self, other: AbsMax) -> None:
        self.value = torch.maximum(self.value, other.value)


class AbsMean(Statistic):
    """The mean magnitude of each input channel, ``[K]``, float32."""

    def __init__(self, columns: int, device: torch.device) -> None:
        super().__init__(columns, device)
        self._sum = torch.zeros(columns, dtype=torch.float64, device=device)

    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        self._sum += x.abs().sum(0, dtype=torch.float32)

    def add(self, other: AbsMean) -> None:
        self._sum += other._sum

    @property
    def value(self) -> Tensor:
        """The mean magnitude; 0 without tokens."""
        return (self._sum / max(self.tokens, 1)).float()


class _Products:
    """``Σ aᵀ b [K, K]`` over batches of tokens, summed by strips of rows in several threads.

    On CPUs batches are collected until they have `_WAITING` tokens, so that threads synchronize once.

    Args:
        columns: K.
        dtype: Dtype of the sum over batches; within a batch it is float32.
        device: Device of the batches.
        is_symmetric: Whether a is b in every batch: then strips are summed from the diagonal on, and fourth
            moments as well.

    Attributes:
        others: Sums of fourth moments, as of `_fourth_moments`; complete once `total` has been called.
    """

    def __init__(self, columns: int, dtype: torch.dtype, device: torch.device, *, is_symmetric: bool) -> None:
        self._sum = torch.zeros(columns, columns, dtype=dtype, device=device)
        self._is_symmetric = is_symmetric
        self._is_mirrored = True
        self.others: Tensor | float = 0.0
        self._waiting: list[tuple[Tensor, Tensor]] = []

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add the product of ``a, b [tokens, K]``, which are kept without a copy and must not be changed."""
        self._waiting.append((a, b))
        if a.device.type != "cpu" or sum(len(tokens) for tokens, _ in self._waiting) >= _WAITING:
            self._sum_up()

    def merge(self, other: _Products) -> None:
        """Add another sum of the same kind."""
        self._sum_up()
        self._sum += other.total()
        self.others = self.others + other.others

    def sum_over(self, ranks: Ranks) -> None:
        """Add the sums of all other ranks; of a symmetric sum a triangle is exchanged."""
        if ranks.size == 1:
            return
        self._sum_up()
        if self._is_symmetric:
            strips = [self._sum[rows, rows.start :] for rows in row_slices(len(self._sum), 1, _STRIP)]
            triangle = torch.cat([strip.reshape(-1) for strip in strips])
            ranks.sum_(triangle)
            for strip, part in zip(strips, triangle.split([strip.numel() for strip in strips]), strict=True):
                strip.copy_(part.view_as(strip))
            self._is_mirrored = False
        else:
            ranks.sum_(self._sum)
        self.others = sum(ranks.gather(self.others), start=0.0)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for other ranks: the sum, and no batch that has still to be added."""
        self._sum_up()
        return self.__dict__

    def total(self) -> Tensor:
        """Return the accumulated tensor itself, which must not be changed."""
        self._sum_up()
        if self._is_symmetric and not self._is_mirrored:
            _mirror_upper_(self._sum)
            self._is_mirrored = True
        return self._sum

    def _sum_up(self) -> None:
        if not self._waiting:
            return
        batches, self._waiting, self._is_mirrored = self._waiting, [], False

        def add_to(rows: slice) -> None:
            start = rows.start if self._is_symmetric else 0
            for a, b in batches:
                _add_product(self._sum[rows, start:], a[:, rows], b[:, start:])

        columns, device = len(self._sum), self._sum.device
        strips = row_slices(columns, 1, _STRIP if device.type == "cpu" else max(_STRIP, -(-columns // _FEW_STRIPS)))
        work: list[Callable[[], Tensor | None]] = [partial(add_to, rows) for rows in strips]
        if self._is_symmetric:
            work += [partial(_fourth_moments, a) for a, _ in batches]
        with _multiplied_as_bfloat16() if all(a.dtype is torch.bfloat16 for a, _ in batches) else nullcontext():
            results = parallel_map(call, work, device)
        self.others = sum((other for other in results if other is not None), start=self.others)


def _fourth_moments(x: Tensor) -> Tensor:
    """Return ``Σ ‖x‖⁴`` and ``Σ_k x_k⁴`` over the tokens of ``x [tokens, K]``, float64."""
    squares = x.float().square()
    return torch.stack([part.double().square().sum() for part in (squares.sum(1), torch.linalg.vector_norm(squares, dim=1))])


def _mirror_upper_(h: Tensor) -> None:
    """Copy the upper triangle of ``h [K, K]`` to the lower one in place, by strips that fit into caches."""

    def mirror(strip: slice) -> None:
        corner = h[strip, strip]
        corner.copy_(corner.triu() + corner.triu(1).t())
        h[strip.stop :, strip] = h[strip, strip.stop :].t()

    parallel_map(mirror, row_slices(len(h), 1, _STRIP), h.device)


@contextmanager
def _multiplied_as_bfloat16() -> Iterator[None]:
    """Let CPUs multiply float32 matrices, whose values are bfloat16, as bfloat16 while the body runs.

    oneDNN does, by AMX or else all of AVX-512, which MKL uses on Intel's alone. One thread at a time borrows
    the setting, the process's. Sums stay float32.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # set when torch replaces the module
    with _PRECISION:
        before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
        try:
            yield
        finally:
            matmul.fp32_precision = before


def _add_product(target: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``aᵀ b`` to ``target`` in place: float32 within a batch, the target's precision over batches."""
    if a.dtype in _HALVES and a.device.type == "cpu":
        for tokens in zip(a.split(_CONVERTED), b.split(_CONVERTED), strict=True):
            _add_product(target, *(part.float() for part in tokens))
    elif a.dtype in _HALVES:
        target += torch.mm(a.t(), b, out_dtype=torch.float32)
    elif target.dtype is torch.float32:
        target.addmm_(a.t(), b)
    else:
        target += torch.mm(a.t(), b)
