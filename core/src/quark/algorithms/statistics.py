"""Statistics of a layer's inputs: what an algorithm declares that it needs, and the pipeline collects once for all layers that share it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from quark.errors import PluginError

_TILES = 4
"""A Hessian is summed in this many strips, each from its own diagonal on: 5/8 of the whole product."""
_SMALLEST_STRIP = 128
_HALVES = (torch.float16, torch.bfloat16)


class Statistic(ABC):
    """A sum over the tokens that reach some layers.

    Two of them can be merged: that equals having seen both sets of tokens, so that ranks can reduce them.

    Args:
        columns: K, the layers' number of input channels.
        device: Where the inputs lie.

    Attributes:
        wants_float: Whether the inputs of the float model are needed beside those of the quantized one, which doubles the forwards.
        tokens: How many tokens were seen.
        derived: What algorithms have computed from the complete statistic and want to find again for other layers.

    Example:
        A statistic of one's own, the largest value of each channel::

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

    def __init__(self, columns: int, device: torch.device) -> None:
        self.columns = columns
        self.device = device
        self.tokens = 0
        self.derived: dict[Any, Any] = {}

    def update(self, x: Tensor, reference: Tensor | None = None) -> None:
        """Take in some tokens.

        Args:
            x: What the layers get in the quantized model, ``[tokens, K]``, in the model's dtype.
            reference: What they get in the float model, likewise; None where that is not known, or ``wants_float`` is not set.

        Raises:
            PluginError: The statistic has changed ``x``.
        """
        self.tokens += x.shape[0]
        if x.shape[0]:
            version = x._version
            self.accumulate(x, reference)
            if x._version != version:
                raise PluginError(
                    f"the statistic {type(self).__name__} changes the inputs that it is shown, which layers are still to read"
                )

    def merge(self, other: Self) -> None:
        """Take in what another statistic of the same kind has seen."""
        self.tokens += other.tokens
        self.add(other)

    @abstractmethod
    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        """`update`, of at least one token."""

    @abstractmethod
    def add(self, other: Self) -> None:
        """`merge`, but for the count."""


class Hessian(Statistic):
    """``H = Σ x xᵀ [K, K]``, the raw sum, in float32.

    Inputs of 16 bits are multiplied as they are on GPUs, with sums in float32, which loses nothing: the product of two such numbers is
    exact in float32.
    """

    master: ClassVar[torch.dtype] = torch.float32

    def __init__(self, columns: int, device: torch.device) -> None:
        super().__init__(columns, device)
        self._sum = torch.zeros(columns, columns, dtype=self.master, device=device)
        self._fourth = torch.zeros(2, dtype=torch.float64, device=device)  # Σ ‖x‖⁴ and Σ_k x_k⁴
        self._is_upper = True

    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        squares = x.float().square()
        self._fourth += torch.stack([part.double().square().sum() for part in (squares.sum(1), torch.linalg.vector_norm(squares, dim=1))])
        x = x if x.is_cuda and x.dtype in _HALVES else x.float()
        strip = max(-(-self.columns // _TILES), _SMALLEST_STRIP)
        for left in range(0, self.columns, strip):
            _add_product(self._sum[left : left + strip, left:], x[:, left : left + strip], x[:, left:])
        self._is_upper = True

    def add(self, other: Hessian) -> None:
        self._sum += other._sum
        self._fourth += other._fourth
        self._is_upper = True

    def matrix(self) -> Tensor:
        """H, symmetric; the sum itself, not to be changed."""
        if self._is_upper:
            # Below the diagonal nothing counts but what lies in the strips, which is the same sum in another order.
            self._sum = self._sum.triu_().add_(self._sum.triu(1).t())
            self._is_upper = False
        return self._sum

    def shrinkage(self) -> tuple[float, float]:
        """Return how much of what H shows is likely to be chance, from 0 to 1: off its diagonal, and in the differences along it.

        The variance of the entries, from the tokens' fourth moments, ÷ what they are in squares: with that share taken from them H is as
        near as it can be to what infinitely many tokens would give. Source: Ledoit, Wolf, "A well-conditioned estimator for
        large-dimensional covariance matrices", 2004; here the diagonal and the rest have a share each.
        """
        if self.tokens < 2:
            return 1.0, 1.0
        h = self.matrix()
        diagonal = h.diagonal().double() / self.tokens
        squares = diagonal.square().sum()
        fourth, of_channels = self._fourth / self.tokens
        alive = diagonal[diagonal > 0]
        entries = torch.stack(
            [(torch.linalg.matrix_norm(h).double() / self.tokens).square() - squares, (alive - alive.mean()).square().sum()]
        )
        variance = torch.stack([fourth - of_channels - entries[0], of_channels - squares]) / (self.tokens - 1)
        shares = torch.where(entries > 0, variance.clamp(min=0) / entries, 1.0).clamp(max=1).nan_to_num(1.0)
        off_diagonal, along = shares.tolist()
        return off_diagonal, along


class Hessian64(Hessian):
    """`Hessian` with the sum over batches in float64."""

    master = torch.float64


class CrossMoment(Statistic):
    """``D = Σ (x_float − x) xᵀ [K, K]``, float32: what the error of the inputs has in common with them.

    Tokens whose float input is not known add nothing.
    """

    wants_float = True

    def __init__(self, columns: int, device: torch.device) -> None:
        super().__init__(columns, device)
        self._sum = torch.zeros(columns, columns, dtype=torch.float32, device=device)

    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        if reference is not None:
            _add_product(self._sum, reference.float() - x.float(), x.float())

    def add(self, other: CrossMoment) -> None:
        self._sum += other._sum

    def matrix(self) -> Tensor:
        """D; the sum itself, not to be changed."""
        return self._sum


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
        """The mean; 0 where nothing was seen."""
        return (self._sum / max(self.tokens, 1)).float()


def _add_product(target: Tensor, a: Tensor, b: Tensor) -> None:
    """``target += aᵀ b`` in place, in the target's precision over batches and float32 within."""
    if a.dtype in _HALVES:
        target += torch.mm(a.t(), b, out_dtype=torch.float32)
    elif target.dtype is torch.float32:
        target.addmm_(a.t(), b)
    else:
        target += torch.mm(a.t(), b)
