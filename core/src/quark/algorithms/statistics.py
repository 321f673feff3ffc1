"""Statistics of the inputs of layers.

An algorithm lists the statistics that it needs in ``needs``. Layers with the same input form an input group.
A run collects each statistic once for each input group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Self, TypeVar, TypeVarTuple, cast

import torch
from torch import Tensor

from quark.algorithms.product_sum import HALVES, ProductSum
from quark.base.parallel import coarsely
from quark.base.ranks import Ranks
from quark.base.scalars import divided
from quark.errors import PluginError

_Arguments = TypeVarTuple("_Arguments")
_Value = TypeVar("_Value")


class Statistic(ABC):
    """A statistic of the input that the layers of an input group share.

    A statistic accumulates tokens, for example in a sum. Two statistics can be merged. The result then equals
    a single statistic of all their tokens. Thus several processes can share the work: each process collects a
    statistic of some tokens, and sends the statistic with all its attributes to the other processes.

    Args:
        columns: K, the number of input channels of the layers.
        device: Device of the inputs.

    Attributes:
        wants_float: Whether the statistic also needs the inputs in the float model, which doubles the number
            of forward passes.
        one_in: The statistic gets only every ``one_in``-th token of each call.
        of_outputs: The class `OutputMoment` if a run may collect this cheaper statistic instead. The run does
            so if a layer shares its input with no other layer and has fewer outputs than inputs. None if no
            other statistic can replace this one.
        tokens: Number of tokens in the sum.
        inputs_last: Whether the inputs stay unchanged until the next `flush`, so that no copy is needed.

    Example:
        A custom statistic that computes the largest value of each channel::

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
    of_outputs: ClassVar[type[OutputMoment] | None] = None

    def __init__(self, columns: int, device: torch.device) -> None:
        self.columns = columns
        self.device = device
        self.tokens = 0
        self.inputs_last = False
        self._derived: dict[Hashable, Any] = {}

    def update(self, x: Tensor, reference: Tensor | None = None) -> None:
        """Add tokens to the statistic.

        Args:
            x: Input of the layers in the quantized model, ``[tokens, K]``, in the dtype of the model.
            reference: Input of the layers in the float model, with the same shape and dtype. None if it is
                unknown or not needed.

        Raises:
            PluginError: `accumulate` has changed ``x`` in place.
        """
        self.tokens += x.shape[0]
        self._derived.clear()
        if x.shape[0]:
            version = x._version
            self.accumulate(x, reference)
            if x._version != version:
                raise PluginError(f"the statistic {type(self).__name__} changes its inputs in place before layers read them: use a copy")

    def merge(self, other: Self) -> None:
        """Add the tokens of another statistic of the same kind."""
        self.tokens += other.tokens
        self._derived.clear()
        self.add(other)

    def of_all_ranks(self, ranks: Ranks) -> Self:
        """Return the statistic of the tokens of all ranks. Do not use ``self`` afterwards.

        The result is the same on every rank. By default, the statistics of all ranks are merged in the order
        of the ranks. Subclasses with large sums use a faster method.
        """
        first, *others = ranks.gather(self)
        for other in others:
            first.merge(other)
        first.device = self.device
        return first

    def derived(self, compute: Callable[[Self, *_Arguments], _Value], *arguments: *_Arguments) -> _Value:
        """Return ``compute(self, *arguments)``. The result is cached until more tokens are added.

        Args:
            compute: A function at the top level of a module. The function and ``arguments`` are the key of
                the cache.
            arguments: Hashable arguments of ``compute`` after the statistic.
        """
        key = (compute, arguments)
        if key not in self._derived:
            self._derived[key] = compute(self, *arguments)
        return cast(_Value, self._derived[key])

    @property
    def flops(self) -> int:
        """Lower bound of the number of floating-point operations so far.

        It is 0 if memory bandwidth, and not computation, limits the speed of updates.
        """
        return 0

    def flush(self) -> None:
        """Compute the sums that `update` has postponed, so that a later use need not wait for them."""
        return

    @abstractmethod
    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        """Add the tokens of ``x`` to the sum.

        `update` calls this method only with at least one token. `update` itself counts the tokens.
        """

    @abstractmethod
    def add(self, other: Self) -> None:
        """Add the sums of ``other``. `merge` calls this method. `merge` itself adds the numbers of tokens."""


class _Moment(Statistic):
    """A sum of products of channels with the shape ``[K, K]`` or ``[rows, K]``.

    A subclass defines the products.
    """

    master: ClassVar[torch.dtype] = torch.float32
    _is_symmetric: ClassVar[bool] = True

    def __init__(self, columns: int, device: torch.device, rows: int | None = None) -> None:
        super().__init__(columns, device)
        self._products = ProductSum(rows or columns, columns, self.master, device, is_symmetric=self._is_symmetric)

    def matrix(self) -> Tensor:
        """Return the accumulated tensor. The tensor of a Hessian is symmetric.

        The result is not a copy, so do not change it.
        """
        return self._products.total()

    def flush(self) -> None:
        self._products.total()

    def _kept(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``x`` in the given dtype. The result is used later in a product.

        The result is a copy if a layer may change ``x`` before the product is computed.
        """
        with coarsely(x.numel(), x.device):
            return x.to(dtype, copy=x.device.type == "cpu" and not self.inputs_last)

    def add(self, other: Self) -> None:
        self._products.merge(other._products)

    def of_all_ranks(self, ranks: Ranks) -> Self:
        self.tokens = ranks.sum(self.tokens)
        self._products.sum_over(ranks)
        return self


class Hessian(_Moment):
    """The Hessian ``H = Σ x xᵀ [K, K]``, an unnormalized float32 sum over the input tokens x of a layer.

    H is the uncentred second moment of the input. Up to a factor, it is the Hessian of the layer's squared
    output error. Products of 16-bit inputs are exact in float32, the dtype of the sum.
    """

    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        x = self._kept(x, x.dtype if x.dtype in HALVES else torch.float32)
        self._products.add(x, x)

    @property
    def flops(self) -> int:
        """Number of floating-point operations so far.

        There are two for each token and each entry of H on or above the diagonal.
        """
        return self.tokens * self.columns * (self.columns + 1)

    def shrinkage(self) -> tuple[float, float]:
        """Return the Ledoit–Wolf shrinkage intensities of H, two numbers from 0 to 1.

        The first is for the entries off the diagonal, and the second is for the diagonal. An intensity is the
        estimated variance of the entries, divided by the sum of their squares. The variance is estimated from
        fourth moments of the tokens. Shrinkage with these intensities minimizes the expected squared
        distance to the Hessian of infinitely many tokens. Source: Ledoit, Wolf, "A well-conditioned
        estimator for large-dimensional covariance matrices", 2004.
        """
        if self.tokens < 2:
            return 1.0, 1.0
        h = self.matrix()
        diagonal = divided(h.diagonal().double(), self.tokens)
        squares = diagonal.square().sum()
        fourth, of_channels = divided(torch.as_tensor(self._products.others), self.tokens)
        alive = diagonal > 0
        mean = torch.where(alive, diagonal, 0).sum() / alive.sum()
        spread = torch.where(alive, diagonal - mean, 0).square().sum()
        entries = torch.stack([divided(torch.linalg.matrix_norm(h).double(), self.tokens).square() - squares, spread])
        variance = divided(torch.stack([fourth - of_channels - entries[0], of_channels - squares]), self.tokens - 1)
        shares = torch.where(entries > 0, variance.clamp(min=0) / entries, 1.0).clamp(max=1).nan_to_num(1.0)
        off_diagonal, along = shares.tolist()
        return off_diagonal, along


class Hessian64(Hessian):
    """A `Hessian` whose sum over batches is computed in float64."""

    master = torch.float64


class CrossMoment(_Moment):
    """The cross moment ``D = Σ (x_float − x) xᵀ [K, K]`` of the input error and the input, in float32.

    ``x`` is the input in the quantized model, and ``x_float`` is the input in the float model. Tokens whose
    float input is unknown are ignored.
    """

    wants_float = True
    _is_symmetric = False

    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        if reference is not None:
            self._products.add(reference.float() - x.float(), self._kept(x, torch.float32))

    @property
    def flops(self) -> int:
        """Number of floating-point operations so far: two for each token and each entry of D."""
        return 2 * self.tokens * self.columns**2


class OutputMoment(_Moment):
    """The cross moment ``Σ y xᵀ [N, K]`` of the float output and the input of a layer, in float32.

    ``y = W x_float`` is the output in the float model, without bias. ``x`` is the input in the quantized
    model. The sum equals ``W (D + H)`` for the `CrossMoment` D and the `Hessian` H of the same tokens.
    Compared with D, the sum needs ``N ÷ K`` times the computation and memory.
    """

    wants_float = True
    _is_symmetric = False

    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        assert reference is not None
        dtype = x.dtype if x.dtype in HALVES else torch.float32
        self._products.add(self._kept(reference, dtype), self._kept(x, dtype))

    @property
    def flops(self) -> int:
        """Number of floating-point operations so far: two for each token and each entry of the sum."""
        return 2 * self.tokens * self.matrix().numel()


class AbsMax(Statistic):
    """The largest magnitude of each input channel, as a float32 tensor ``[K]``."""

    def __init__(self, columns: int, device: torch.device) -> None:
        super().__init__(columns, device)
        self.value = torch.zeros(columns, dtype=torch.float32, device=device)

    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        self.value = torch.maximum(self.value, x.abs().amax(0).float())

    def add(self, other: AbsMax) -> None:
        self.value = torch.maximum(self.value, other.value)


class AbsMean(Statistic):
    """The mean magnitude of each input channel, as a float32 tensor ``[K]``."""

    def __init__(self, columns: int, device: torch.device) -> None:
        super().__init__(columns, device)
        self._sum = torch.zeros(columns, dtype=torch.float64, device=device)

    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        self._sum += x.abs().sum(0, dtype=torch.float32)

    def add(self, other: AbsMean) -> None:
        self._sum += other._sum

    @property
    def value(self) -> Tensor:
        """The mean magnitude of each channel, or 0 if there are no tokens."""
        return divided(self._sum, max(self.tokens, 1)).float()
