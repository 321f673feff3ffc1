"""Calibration tokens that are held out.

An algorithm validates its decisions on tokens that it has not seen.

There are three rules, for three kinds of decisions:

- `held_out`, for transforms, which compare whole outputs of a block: whole sequences, an eighth to a quarter
  of all tokens. The choice depends on the contents of the sequences alone, neither on their
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

import torch
from torch import Tensor

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


def held_out(batches: Sequence[Tensor]) -> list[Tensor]:
    """Return for each batch which of its tokens are held out.

    A result is bool, on the CPU: ``[batch, tokens]`` for token ids, and ``[batch, 1]`` for rows that are not
    made of tokens, such as images.

    Whole sequences are, if there are enough of them (eight, if all have one length): those that a hash of
    their content puts first, and equal ones together. Of fewer, the last eighth of the tokens of each. Where
    neither can be, as with one image, all masks are False.

    Args:
        batches: All of them: token ids ``[batch, tokens]``, or any other tensors whose first axis is the
            batch.
    """
    rows, is_enough = _rows(batches)
    if not is_enough:
        ends = [_end_of_each(batch) for batch in batches]
        if any(bool(mask.any()) for mask in ends):
            return ends
    masks = [torch.zeros(len(batch), _tokens_in_row(batch), dtype=torch.bool) for batch in batches]
    for number, row in rows:
        masks[number][row] = True
    return masks


def _are_ids(batch: Tensor) -> bool:
    """Return whether rows are made of tokens: some of them can be held out."""
    return batch.ndim == 2 and not batch.is_floating_point()


def _tokens_in_row(batch: Tensor) -> int:
    return batch.shape[1] if _are_ids(batch) else 1


def _rows(batches: Sequence[Tensor]) -> tuple[list[tuple[int, int]], bool]:
    """Return rows to hold out, each a batch's number and its own, and whether they are enough.

    They have at most `MOST_SHARE` of all tokens.
    """
    equal: dict[bytes, list[tuple[int, int]]] = {}
    for number, batch in enumerate(batches):
        for row, digest in enumerate(_digests(batch)):
            equal.setdefault(digest, []).append((number, row))
    total, size = sum(len(batch) * _tokens_in_row(batch) for batch in batches), 0
    chosen: list[tuple[int, int]] = []
    number_of_groups = 0
    for _, group in sorted(equal.items()):
        more = sum(_tokens_in_row(batches[number]) for number, _ in group)
        if size + more <= MOST_SHARE * total:
            chosen += group
            size, number_of_groups = size + more, number_of_groups + 1
        if size >= LEAST_SHARE * total and number_of_groups >= FEWEST_SEQUENCES:
            return chosen, True
    return chosen, False


def _digests(batch: Tensor) -> Iterator[bytes]:
    """Yield a hash of each row; the dtype of token ids makes no difference."""
    for row in batch.detach().cpu():
        content = (row.long() if _are_ids(batch) else row).contiguous()
        yield hashlib.blake2b(ctypes.string_at(content.data_ptr(), content.nbytes), digest_size=16).digest()


def _end_of_each(batch: Tensor) -> Tensor:
    """Return the last eighth of the tokens of each row, rounded, and one of four to eleven."""
    tokens = _tokens_in_row(batch)
    wanted = max(1, round(tokens * LEAST_SHARE)) if tokens * MOST_SHARE >= 1 else 0
    return (torch.arange(tokens) >= tokens - wanted).expand(len(batch), -1)


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
