"""Validation: compares output errors before and after a change of weights, on held-out tokens.

The change does not depend on these tokens.

The threshold is one standard error of the difference, which is computed token by token:

- A transform is kept only if it makes the error *smaller* by more than that (`Validation.is_improvement`):
  without a gain, the plain model is simpler.
- Codes of a calibrated rounding are discarded only if they make the error *larger* by more than that
  (`is_worse`): they minimize the error over many more tokens than are held out.

An error that is NaN or unknown counts as no improvement.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Self

import attrs
import torch
from torch import Tensor

from quark.base.scalars import numbers

_TINY = torch.finfo(torch.float32).tiny
_LEAST = 1e-6
"""Minimum energy of a channel, relative to the mean energy; for channels that are always 0."""


@attrs.frozen(eq=False)
class OutputError:
    """The output error of a rounded block, token by token.

    Attributes:
        squares: Squared error of each token, ``[tokens]``, float32.
        sizes: Squared norm of each token's reference output, ``[tokens]``, float32, above 0.
        is_held_out: Whether the change does not depend on these tokens.
    """

    squares: Tensor
    sizes: Tensor
    is_held_out: bool = True

    @classmethod
    def of(cls, output: Tensor, reference: Tensor, *, channels: Tensor | None = None, is_held_out: bool = True) -> Self:
        """Return the error of ``output [tokens, channels]`` against ``reference``, of the same shape.

        ``channels`` are factors of both, ``[channels]``, as in `channel_factors`.
        """
        expected = reference.float()
        error = output.float() - expected
        if channels is not None:
            error, expected = error * channels, expected * channels
        return cls(error.square().sum(-1), expected.square().sum(-1).clamp(min=_TINY), is_held_out)

    @classmethod
    def joined(cls, errors: Sequence[Self]) -> Self:
        """Return the errors of different tokens as one; give at least one."""
        squares, sizes = (torch.cat([getattr(error, name) for error in errors]) for name in ("squares", "sizes"))
        return cls(squares, sizes, all(error.is_held_out for error in errors))

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.squares)

    @property
    def relative(self) -> Tensor:
        """Squared error of each token ÷ squared norm of its reference, ``[tokens]``, float64.

        The norm before the next block divides each token by its own size. In a plain sum of errors, the few
        tokens with massive activations that many models have would outweigh all others.
        """
        return self.squares.double() / self.sizes.double()


def channel_factors(references: Iterable[Tensor]) -> Tensor:
    """Return the factors ``[channels]``, float32, for comparing channels of outputs: 1 ÷ √RMS.

    RMS is the root mean square of a channel in ``references [tokens, channels]``. In many models, a few
    channels of the residual stream have most of its energy: in Gemma 3 270M, four have up to 97 %. The
    weights of norms scale these channels down. Without factors, an error would measure only these channels;
    with 1 ÷ RMS, channels with little content would count as much.
    """
    energy = torch.stack([reference.float().square().sum(0) for reference in references]).sum(0)
    return torch.maximum(energy, energy.mean() * _LEAST).clamp(min=_TINY).pow(-0.25)


@attrs.frozen
class Validation:
    """Mean relative output errors before and after a change.

    Attributes:
        before: Mean relative error before the change.
        after: Mean relative error after the change.
        standard_error: Standard error of the difference, paired by token. Tokens of one text are correlated,
            so the true value is larger.
        tokens: Number of tokens.
        is_held_out: Whether the change does not depend on these tokens.
    """

    before: float
    after: float
    standard_error: float
    tokens: int
    is_held_out: bool

    @property
    def is_improvement(self) -> bool:
        """Whether the error fell by more than the standard error.

        False if one of the three numbers is NaN.
        """
        return self.after < self.before - self.standard_error

    @property
    def factor(self) -> float:
        """Error after the change ÷ error before."""
        return self.after / max(self.before, _TINY)

    def metrics(self) -> dict[str, Any]:
        """Return the fields for a report; a number that is not finite becomes None."""
        numbers = {"error_before": self.before, "error_after": self.after, "standard_error": self.standard_error}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        return {**finite, "tokens": self.tokens, "held_out": self.is_held_out}


def validated(before: Sequence[OutputError], after: Sequence[OutputError]) -> Validation:
    """Return the comparison of relative errors (`OutputError.relative`) of tokens before and after a change.

    Args:
        before: Errors of each block before the change.
        after: Errors of each block after the change.

    Returns:
        Means over tokens and blocks; NaN without tokens.
    """
    if not before or before[0].tokens == 0:
        return Validation(math.nan, math.nan, math.nan, 0, is_held_out=False)
    first, second = _by_token(before), _by_token(after)
    tokens = len(first)
    mean, mean_after, deviation = numbers(first.mean(), second.mean(), _deviation(second - first))
    return Validation(mean, mean_after, deviation / tokens**0.5, tokens, is_held_out=all(e.is_held_out for e in before))


def _by_token(errors: Sequence[OutputError]) -> Tensor:
    """Return the mean error of each token over the blocks that it passes, ``[tokens]``.

    Blocks with another number of tokens belong to another stream: an encoder's, or its decoder's.
    """
    of_streams: dict[int, list[Tensor]] = {}
    for error in errors:
        of_streams.setdefault(len(error.relative), []).append(error.relative)
    return torch.cat([torch.stack(blocks).mean(0) for blocks in of_streams.values()])


def is_worse(errors: Tensor, others: Tensor) -> bool:
    """Return whether ``errors [tokens]`` exceed ``others [tokens]`` by more than a standard error.

    Both belong to the same tokens. Errors that are not finite are always worse.
    """
    difference = errors.double() - others.double()
    is_finite, mean, deviation = numbers(torch.isfinite(errors).all(), difference.mean(), _deviation(difference))
    return not is_finite or mean > deviation / len(difference) ** 0.5


def standard_error(differences: Tensor) -> float:
    """Return the standard error of the mean of ``differences [tokens]``, float64.

    Infinite for fewer than two tokens.
    """
    return float(_deviation(differences)) / len(differences) ** 0.5


def _deviation(differences: Tensor) -> Tensor:
    """Return the standard deviation of ``differences [tokens]``; infinite for fewer than two tokens."""
    return differences.std() if len(differences) > 1 else differences.new_full((), math.inf)
