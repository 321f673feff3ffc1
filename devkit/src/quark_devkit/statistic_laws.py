"""Laws for statistics: results depend neither on batches of the tokens nor on the order of merged parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import attrs
import torch
from torch import Tensor

from quark.algorithms import Statistic
from quark_devkit.check import require

__all__ = ["COLUMNS", "Inputs", "inputs", "require_sum", "statistics_by_grouping"]

_BATCHES = (1, 250, 7, 126)
"""Tokens of each part, few or many; 384 together."""
_TOLERANCE = 1e-4
"""Difference relative to the largest value: far above float32 rounding of a sum of some hundred tokens."""

Feed = Callable[[Statistic, slice], None]
"""Gives a statistic some of the tokens."""


COLUMNS, TOKENS = 128, 384


@attrs.frozen(eq=False)
class Inputs:
    """Inputs of layers.

    Attributes:
        x: Input in the quantized model, ``[tokens, COLUMNS]``.
        reference: Input in the float model, ``[tokens, COLUMNS]``.
    """

    x: Tensor
    reference: Tensor

    def __getitem__(self, tokens: slice) -> Inputs:
        return Inputs(self.x[tokens], self.reference[tokens])


@cache
def inputs(seed: int, tokens: int = TOKENS, columns: int = COLUMNS) -> Inputs:
    """Return tokens whose channels are correlated and have different magnitudes. Do not change these tensors.

    Values are moderate multiples of 1/8, so float32 sums of products are exact in any order.
    """
    generator = torch.Generator().manual_seed(99)
    sizes = torch.logspace(0, -1.5, columns, dtype=torch.float32) / 4
    mixing = torch.randn(columns, columns, generator=generator, dtype=torch.float32) * sizes
    base = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float32) @ mixing
    return Inputs((base * 8).round() / 8, (base * 8 + 0.5).floor() / 8)


def statistics_by_grouping(make: Callable[[], Statistic], feed: Feed) -> dict[str, Statistic]:
    """Return statistics of the same tokens, by the way in which the tokens were grouped.

    The first statistic got all tokens at once.

    Args:
        make: Makes an empty statistic.
        feed: Updates a statistic with a slice of the 384 tokens.
    """
    ends = [sum(_BATCHES[:count]) for count in range(len(_BATCHES) + 1)]
    slices = [slice(*pair) for pair in pairwise(ends)]

    def of(parts: Iterable[slice]) -> Statistic:
        statistic = make()
        for part in parts:
            feed(statistic, part)
        return statistic

    def merged(pairs: Sequence[tuple[int, int]]) -> Statistic:
        parts = [of([part]) for part in slices]
        for first, second in pairs:
            parts[first].merge(parts[second])
        return parts[pairs[-1][0]]

    return {
        "of all tokens at once": of([slice(0, ends[-1])]),
        "of four unequal batches": of(slices),
        "of the same batches from the last to the first": of(slices[::-1]),
        "merged of four parts, two by two": merged([(0, 1), (2, 3), (0, 2)]),
        "merged of four parts, from the last": merged([(2, 3), (1, 2), (0, 1)]),
    }


def require_sum(kind: type[Statistic]) -> None:
    """Require that a statistic depends neither on the batches of its tokens nor on the grouping of merged
    parts.

    A statistic that samples tokens must sample nearly every batch.

    Args:
        kind: The class of the statistic.
    """
    data = inputs(0)
    x, reference = data.x, data.reference

    def feed(statistic: Statistic, tokens: slice) -> None:
        statistic.update(x[tokens].clone(), reference[tokens].clone() if kind.wants_float else None)

    made = statistics_by_grouping(lambda: kind(COLUMNS, torch.device("cpu")), feed)
    (_, first), *others = made.items()
    for how, other in others:
        name = f"has a statistic {kind.__name__} that"
        require(other.tokens == first.tokens == len(x), f"{name} counts {other.tokens} tokens of {len(x)}, {how}")
    facts = {how: _facts(statistic) for how, statistic in made.items()}
    (_, wanted), *rest = facts.items()
    for how, seen in rest:
        for fact, value in wanted.items():
            if (batches := _batches_in(seen.get(fact), x)) is not None:
                fewest = len(_BATCHES) - 1
                require(
                    batches >= fewest, f"has a statistic {kind.__name__} that samples tokens of {batches} of {len(_BATCHES)} batches, {how}"
                )
                continue
            require(_near(value, seen.get(fact)), f"has a statistic {kind.__name__} with another {fact} {how} than of all tokens at once")


def _facts(statistic: Statistic) -> dict[str, Tensor]:
    """Return the tensors and floats in the public members of a statistic. If there are none, return those in
    all its attributes."""
    found: dict[str, Tensor] = {}
    for name in dir(statistic):
        if name.startswith("_") or hasattr(Statistic, name):
            continue
        value: Any = getattr(statistic, name)
        if inspect.ismethod(value) and not inspect.signature(value).parameters:
            value = value()
        found.update(_tensors(name, value))
    held = {key: value for name, own in vars(statistic).items() for key, value in _tensors(name, own)}
    return found or held


def _tensors(name: str, value: Any) -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(f"'{name}'", value)]
    if isinstance(value, float):
        return [(f"'{name}'", torch.tensor(value, dtype=torch.float64))]
    return [pair for one in value for pair in _tensors(name, one)] if isinstance(value, tuple | list) else []


def _batches_in(sample: Tensor | None, x: Tensor) -> int | None:
    """Return the number of batches from which the rows of a sample come; None if the rows are not tokens."""
    if sample is None or sample.ndim != 2 or sample.shape[1] != x.shape[1] or not len(sample):
        return None
    is_same = (sample[:, None, :].float() == x[None]).all(-1)
    if not bool(is_same.any(1).all()):
        return None
    return sum(bool(part.any()) for part in is_same.any(0).split(_BATCHES))


def _near(one: Tensor, other: Tensor | None) -> bool:
    if other is None or one.shape != other.shape:
        return False
    if not one.numel():
        return True
    one, other = one.double(), other.double()
    return bool(((one - other).abs().max() <= _TOLERANCE * one.abs().max().clamp(min=1e-12)) | one.equal(other))
