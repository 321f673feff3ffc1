"""Validation compares output errors on held-out tokens before and after a change of weights.

The change does not depend on the held-out tokens.

Each token has an error before and an error after the change. The threshold is one standard error of the mean
of their differences:

- A run keeps a transform only if it makes the error *smaller* by more than the threshold
  (`Validation.is_improvement`). A transform without a clear gain makes the model more complex for nothing.
- A run discards the codes of a calibrated rounding only if they make the error *larger* by more than the
  threshold (`is_worse`). Such codes minimize the error over far more tokens than the held-out ones.

If an error is NaN or unknown, the change does not count as an improvement.
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
"""Lower limit for the energy of a channel, relative to the mean energy.

It applies to channels that are always 0.
"""


@attrs.frozen(eq=False)
class OutputError:
    """The output error of a rounded block for each token.

    Attributes:
        squares: Squared error of each token, as a float32 tensor ``[tokens]``.
        sizes: Squared norm of each token's reference output, as a float32 tensor ``[tokens]``. All values are
            above 0.
        is_held_out: Whether the tokens are held out. If so, the validated change does not depend on them.
    """

    squares: Tensor
    sizes: Tensor
    is_held_out: bool = True

    @classmethod
    def of(cls, output: Tensor, reference: Tensor, *, channels: Tensor | None = None, is_held_out: bool = True) -> Self:
        """Return the error of ``output`` relative to ``reference``.

        Both have the shape ``[tokens, channels]``. Before the comparison, both are multiplied by the factors
        ``channels``, such as the result of `channel_factors`.
        """
        expected = reference.float()
        error = output.float() - expected
        if channels is not None:
            error, expected = error * channels, expected * channels
        return cls(error.square().sum(-1), expected.square().sum(-1).clamp(min=_TINY), is_held_out)

    @classmethod
    def joined(cls, errors: Sequence[Self]) -> Self:
        """Return one object with the errors of all tokens in ``errors``. ``errors`` must not be empty."""
        squares, sizes = (torch.cat([getattr(error, name) for error in errors]) for name in ("squares", "sizes"))
        return cls(squares, sizes, all(error.is_held_out for error in errors))

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.squares)

    @property
    def relative(self) -> Tensor:
        """Squared error of each token divided by the squared norm of the token's reference output.

        The result is a float64 tensor ``[tokens]``. The norm layer in front of the next block also divides
        each token by the token's own size. Many models have a few tokens with massive activations. In a sum
        of squared errors, these tokens would outweigh all others.
        """
        return self.squares.double() / self.sizes.double()


def channel_factors(references: Iterable[Tensor]) -> Tensor:
    """Return the factor 1 ÷ √RMS for each channel, as a float32 tensor ``[channels]``.

    Outputs are multiplied by these factors before they are compared. RMS is the root mean square of a channel
    over all ``references``, which are tensors ``[tokens, channels]``. In many models, a few channels of the
    residual stream contain most of the energy. For example, four channels of Gemma 3 270M contain up to 97 %.
    The weights of norm layers scale these channels down. Without factors, an error would measure only these
    channels. With factors 1 ÷ RMS, channels of low energy would have the same weight as all others.
    """
    energy = torch.stack([reference.float().square().sum(0) for reference in references]).sum(0)
    return torch.maximum(energy, energy.mean() * _LEAST).clamp(min=_TINY).pow(-0.25)


@attrs.frozen
class Validation:
    """Mean relative output errors before and after a change.

    Attributes:
        before: Mean relative error before the change.
        after: Mean relative error after the change.
        standard_error: Standard error of the mean difference between a token's errors before and after the
            change. Tokens of the same text are correlated, so the true standard error is larger.
        tokens: Number of tokens.
        is_held_out: Whether the tokens are held out. If so, the change does not depend on them.
    """

    before: float
    after: float
    standard_error: float
    tokens: int
    is_held_out: bool

    @property
    def is_improvement(self) -> bool:
        """Whether the mean error has decreased by more than the standard error.

        It is False if ``before``, ``after`` or ``standard_error`` is NaN.
        """
        return self.after < self.before - self.standard_error

    @property
    def factor(self) -> float:
        """The error after the change, divided by the error before the change."""
        return self.after / max(self.before, _TINY)

    def metrics(self) -> dict[str, Any]:
        """Return the fields as a dictionary, for a report. A number that is not finite becomes None."""
        numbers = {"error_before": self.before, "error_after": self.after, "standard_error": self.standard_error}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        return {**finite, "tokens": self.tokens, "held_out": self.is_held_out}


def validated(before: Sequence[OutputError], after: Sequence[OutputError]) -> Validation:
    """Compare the relative errors of tokens (`OutputError.relative`) before and after a change.

    Args:
        before: Errors of each block before the change.
        after: Errors of each block after the change.

    Returns:
        The mean errors over tokens and blocks. They are NaN if there are no tokens.
    """
    if not before or before[0].tokens == 0:
        return Validation(math.nan, math.nan, math.nan, 0, is_held_out=False)
    first, second = _by_token(before), _by_token(after)
    tokens = len(first)
    mean, mean_after, deviation = numbers(first.mean(), second.mean(), _deviation(second - first))
    return Validation(mean, mean_after, deviation / tokens**0.5, tokens, is_held_out=all(e.is_held_out for e in before))


def _by_token(errors: Sequence[OutputError]) -> Tensor:
    """Return each token's mean relative error over the blocks that process the token, ``[tokens]``.

    The function assumes that blocks with the same number of tokens process the same tokens. For example, the
    blocks of an encoder and the blocks of a decoder have different numbers of tokens.
    """
    of_streams: dict[int, list[Tensor]] = {}
    for error in errors:
        of_streams.setdefault(len(error.relative), []).append(error.relative)
    return torch.cat([torch.stack(blocks).mean(0) for blocks in of_streams.values()])


def is_worse(errors: Tensor, others: Tensor) -> bool:
    """Return whether the mean of ``errors`` exceeds the mean of ``others`` by more than a standard error.

    Both arguments must contain errors of the same tokens, ``[tokens]``. If ``errors`` contains a value that
    is not finite, return True.
    """
    difference = errors.double() - others.double()
    is_finite, mean, deviation = numbers(torch.isfinite(errors).all(), difference.mean(), _deviation(difference))
    return not is_finite or mean > deviation / len(difference) ** 0.5


def standard_error(differences: Tensor) -> float:
    """Return the standard error of the mean of the float64 tensor ``differences [tokens]``.

    The result is infinite for fewer than two tokens.
    """
    return float(_deviation(differences)) / len(differences) ** 0.5


def _deviation(differences: Tensor) -> Tensor:
    """Return the standard deviation of ``differences [tokens]``. It is infinite for fewer than two tokens."""
    return differences.std() if len(differences) > 1 else differences.new_full((), math.inf)
