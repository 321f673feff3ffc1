"""Calibration tokens that are held out.

An algorithm validates its decisions on tokens that it has not seen.

There are three rules, for three kinds of decisions:

- `held_out`, for transforms, which compare whole outputs of a block: whole sequences, an eighth to a quarter
  of all tokens, never padding. The choice depends on the contents of the sequences alone, neither on their
  order nor on how they are split into batches.
- `held_out_tokens`, for roundings, which compare the outputs of one layer: one token in sixteen, at most 128,
  the first ones of each input.
- `held_out_ends`, for tunings, which compare whole outputs of a block, and fit so much that every sequence
  counts: the end of each.

How two errors on such tokens are compared is said in `quark.algorithms.validation`.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Sequence

import attrs
import torch
from torch import Tensor

__all__ = [
    "FEWEST_SEQUENCES",
    "FEWEST_TOKENS",
    "LEAST_SHARE",
    "MOST_SHARE",
    "MOST_TOKENS",
    "ONE_IN",
    "TOKENS_PER_CHANNEL",
    "Sequences",
    "held_out",
    "held_out_ends",
    "held_out_tokens",
]

LEAST_SHARE = 1 / 8
"""Of all tokens, the share that is held out for transforms."""
MOST_SHARE = 1 / 4
"""The share that is never exceeded: tokens that are held out are lost to the statistics."""
FEWEST_SEQUENCES = 2
"""Sequences that are held out at least, where whole ones are: one says more about itself than about the
others.
"""

ONE_IN = 16
"""For roundings, one token in so many is held out: what that takes from the statistics is less than their
noise.
"""
MOST_TOKENS = 128
"""More are not held out for a rounding: a comparison of two roundings on the same tokens needs no more, and
costs little.
"""
FEWEST_TOKENS = 4
"""Fewer would show nothing, and are not held out."""
TOKENS_PER_CHANNEL = 2
"""With this many tokens for each input channel, the held-out ones are in the statistics too.

Codes are hardly fitted to single tokens then.
On SmolLM2, 128 of 2,048 tokens left out of the statistics cost more than validation on unseen tokens could
win.
"""


@attrs.frozen(eq=False)
class Sequences:
    """The sequences of one call of the model.

    Attributes:
        rows: Token ids ``[batch, tokens]``, or any other tensor whose first axis is the batch, such as
            images.
        is_token: ``[batch, tokens]``, nonzero where a token is no padding; None where all count.
    """

    rows: Tensor
    is_token: Tensor | None = None

    @property
    def tokens(self) -> Tensor:
        """Tokens that may be held out, bool, on the CPU.

        ``[batch, tokens]``, or ``[batch, 1]`` where rows are not made of token ids.
        """
        shape = self.rows.shape if self.are_ids else (self.rows.shape[0], 1)
        if self.is_token is not None and self.is_token.shape == shape:
            return self.is_token.cpu() != 0
        return torch.ones(shape, dtype=torch.bool)

    @property
    def are_ids(self) -> bool:
        """Whether rows are made of tokens: some of them can be held out."""
        return self.rows.ndim == 2 and not self.rows.is_floating_point()


def held_out(calls: Sequence[Sequences]) -> list[Tensor]:
    """Return for each call which of its tokens are held out.

    A result is bool, of the shape of `Sequences.tokens`, on the CPU.

    Whole sequences are, if there are enough of them (eight, if all have one length): those that a hash of
    their content puts first, and equal ones together. Of fewer, the last eighth of the tokens of each. Where
    neither can be, as with one image, all masks are False.

    Args:
        calls: All of them; of each, whatever its rows are.
    """
    tokens = [call.tokens for call in calls]
    rows, is_enough = _rows(calls, tokens)
    if not is_enough:
        ends = [_end_of_each(t) for t in tokens]
        if any(bool(mask.any()) for mask in ends):
            return ends
    masks = [torch.zeros_like(t) for t in tokens]
    for call, row in rows:
        masks[call][row] = tokens[call][row]
    return masks


def _rows(calls: Sequence[Sequences], tokens: Sequence[Tensor]) -> tuple[list[tuple[int, int]], bool]:
    """Return rows to hold out, each a call's number and its own, and whether they are enough.

    They have at most `MOST_SHARE` of all tokens.
    """
    equal: dict[bytes, list[tuple[int, int]]] = {}
    for number, call in enumerate(calls):
        for row, digest in _digests(call, tokens[number]):
            equal.setdefault(digest, []).append((number, row))
    total, size = sum(int(t.sum()) for t in tokens), 0
    chosen: list[tuple[int, int]] = []
    number_of_groups = 0
    for _, group in sorted(equal.items()):
        more = sum(int(tokens[number][row].sum()) for number, row in group)
        if size + more <= MOST_SHARE * total:
            chosen += group
            size, number_of_groups = size + more, number_of_groups + 1
        if size >= LEAST_SHARE * total and number_of_groups >= FEWEST_SEQUENCES:
            return chosen, True
    return chosen, False


def _digests(call: Sequences, tokens: Tensor) -> Iterator[tuple[int, bytes]]:
    """Yield a hash of each row that has tokens; padding, and the dtype of token ids, make no difference."""
    rows = call.rows.detach().cpu()
    for number in torch.nonzero(tokens.any(-1)).flatten().tolist():
        row = (rows[number].long()[tokens[number]] if call.are_ids else rows[number]).contiguous()
        content = ctypes.string_at(row.data_ptr(), row.numel() * row.element_size())
        yield number, hashlib.blake2b(content, digest_size=16).digest()


def _end_of_each(tokens: Tensor) -> Tensor:
    """Return the last eighth of the tokens of each row, rounded, and one of four to eleven."""
    counts = tokens.sum(-1, keepdim=True)
    wanted = torch.where(counts * MOST_SHARE < 1, 0, (counts * LEAST_SHARE).round().clamp(min=1))
    from_the_end = tokens.flip(-1).cumsum(-1).flip(-1)
    return tokens & (from_the_end <= wanted)


def held_out_tokens(tokens: int) -> int:
    """Return how many of that many tokens of a layer's input are held out for a rounding: the first ones.

    They are the beginning of a sequence, since that is where many models have a token of enormous
    activations, to which all others attend: tokens from the middle of sequences show nothing of it, while the
    statistics, and what is rounded by them, go by it above all. Neighbours of a held-out token, which are
    like it, are held out with it. Experts get tokens and no sequences; theirs are held out alike.
    """
    count = min(MOST_TOKENS, tokens // ONE_IN)
    return count if count >= FEWEST_TOKENS else 0


def held_out_ends(rows: Tensor) -> Tensor:
    """Return which tokens of a call are held out for a tuning, bool, ``[tokens]``.

    Of each sequence it is the last one in sixteen, or none.

    Whole sequences are not: a quarter of the data less costs a tuning more than their independence is worth.

    Args:
        rows: Number of the sequence of each token, ``[tokens]``, in ascending order.
    """
    counts = torch.bincount(rows)
    ends = counts.cumsum(0)[rows]
    from_the_end = ends - torch.arange(len(rows), device=rows.device)  # the last token has 1
    return from_the_end <= (counts // ONE_IN)[rows]
