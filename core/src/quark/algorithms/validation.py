"""Validation: whether a change of weights makes errors smaller, on tokens that it was not made from.

The rule is one standard error of the difference, token by token, in favour of what is expected:

- A transform is kept only if it makes the error *smaller* by more than that (`Validation.is_improvement`): without it there is less to go
  wrong, and less to undo.
- Codes of a calibrated rounding are given up only if they make it *larger* by more than that (`is_worse`): they minimize the error over
  many more tokens than are held out.

What is not a number, or cannot be told, is in neither case better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import attrs
import torch
from torch import Tensor

__all__ = ["OutputError", "Validation", "is_worse", "standard_error", "validated"]

_TINY = torch.finfo(torch.float32).tiny


@attrs.frozen(eq=False)
class OutputError:
    """The errors of a block's output, were the block rounded, token by token.

    Attributes:
        squares: Of each token's error, ``[tokens]``, float32.
        sizes: Squares of what each token should be, likewise, above 0.
        is_held_out: Whether the tokens were kept from whatever the change was made from.
    """

    squares: Tensor
    sizes: Tensor
    is_held_out: bool = True

    @classmethod
    def of(cls, found: Tensor, reference: Tensor, *, is_held_out: bool = True) -> Self:
        """Return that of ``found [tokens, channels]``, which should be ``reference``."""
        wanted = reference.float()
        return cls((found.float() - wanted).square().sum(-1), wanted.square().sum(-1).clamp(min=_TINY), is_held_out)

    @property
    def tokens(self) -> int:
        """How many there are."""
        return len(self.squares)

    @property
    def relative(self) -> Tensor:
        """Of each token, ``[tokens]``, float64: its squared error ÷ the square of what it should be.

        The norm in front of the next block divides each token by its own size. In the error of all of them together a few tokens of
        enormous activations, which many models have, count for nearly all, and nothing could be told from so few.
        """
        return self.squares.double() / self.sizes.double()


@attrs.frozen
class Validation:
    """What became of an error.

    Attributes:
        before: The relative error, as things were.
        after: After the change.
        standard_error: Of the difference: both are of the same tokens, and compared token by token. Tokens of one text are alike, so that
            it is rather larger than this.
        tokens: How many there were.
        is_held_out: Whether the change was made from other tokens.
    """

    before: float
    after: float
    standard_error: float
    tokens: int
    is_held_out: bool

    @property
    def is_improvement(self) -> bool:
        """Whether the error is smaller by more than its standard error: not where that cannot be told, or one of them is not a number."""
        return self.after < self.before - self.standard_error

    @property
    def factor(self) -> float:
        """How many times as large the error is."""
        return self.after / max(self.before, _TINY)

    def metrics(self) -> dict[str, Any]:
        """What there is to report; a number that is not finite is None."""
        numbers = {"error_before": self.before, "error_after": self.after, "standard_error": self.standard_error}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        return {**finite, "tokens": self.tokens, "held_out": self.is_held_out}


def validated(before: Sequence[OutputError], after: Sequence[OutputError]) -> Validation:
    """Compare relative errors of the same tokens (`OutputError.relative`).

    Args:
        before: Of each block, as it was.
        after: Of each block, as it is.

    Returns:
        Means over tokens and blocks.
    """
    tokens = before[0].tokens if before else 0
    if tokens == 0:
        return Validation(math.nan, math.nan, math.nan, 0, is_held_out=False)
    one, other = (torch.stack([error.relative for error in errors]).mean(0) for errors in (before, after))
    error = standard_error(other - one)
    return Validation(float(one.mean()), float(other.mean()), error, tokens, is_held_out=all(e.is_held_out for e in before))


def is_worse(errors: Tensor, others: Tensor) -> bool:
    """Return whether ``errors [tokens]`` are larger than ``others [tokens]``, of the same tokens, by more than a standard error.

    Those that are not finite are worse than any.
    """
    if not bool(torch.isfinite(errors).all()):
        return True
    difference = errors.double() - others.double()
    return float(difference.mean()) > standard_error(difference)


def standard_error(differences: Tensor) -> float:
    """Return the standard error of the mean of ``differences [tokens]``, float64; infinite for fewer than two tokens."""
    return float(differences.std()) / len(differences) ** 0.5 if len(differences) > 1 else math.inf
