"""Calibration tokens that are held out.

An algorithm validates its decisions on tokens that it has not seen. There are three rules, for three kinds of
decisions:

- `held_out`, for transforms, which compare whole outputs of a block: whole sequences, an eighth to a quarter
  of all tokens. The choice depends only on the contents of the sequences, not on their order or their
  batches.
- `held_out_tokens`, for roundings, which compare the outputs of one layer: the first tokens of each input,
  one in sixteen, at most 128.
- `held_out_ends`, for tunings, which compare whole outputs of a block, and fit so much that they need every
  sequence: the end of each.

`quark.algorithms.validation` says how two errors on such tokens are compared.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

LEAST_SHARE = 1 / 8
"""Share of all tokens that is held out for transforms."""
MOST_SHARE = 1 / 4
"""Maximum share of held-out tokens, which are lost to the statistics."""
FEWEST_SEQUENCES = 2
"""Minimum number of held-out sequences, if whole sequences are held out: one sequence is not representative.
"""

ONE_IN = 16
"""One in this many tokens is held out for roundings. The loss is smaller than the noise of the statistics."""
MOST_TOKENS = 128
"""Maximum number of tokens held out for a rounding: enough to compare two roundings on the same tokens."""
FEWEST_TOKENS = 4
"""Minimum number of held-out tokens; with fewer, the comparison would be noise."""
TOKENS_PER_CHANNEL = 2
"""With this many tokens for each input channel, held-out tokens are in the statistics too.

Codes then hardly overfit single tokens. On SmolLM2, leaving 128 of 2,048 tokens out of the statistics cost
more than validation on unseen tokens could gain.
"""


def held_out(batches: Sequence[Tensor]) -> list[Tensor]:
    """Return, for each batch, which of its tokens are held out.

    A result is bool, on the CPU: ``[batch, tokens]`` for token ids, and ``[batch, 1]`` for rows without
    tokens, such as images.

    Whole sequences are held out if there are enough of them (eight, if all have one length): the sequences
    whose contents have the smallest hashes, with equal sequences together. With fewer sequences, the last
    eighth of the tokens of each is held out. If neither is possible, as with one image, all masks are False.

    Args:
        batches: All batches: token ids ``[batch, tokens]``, or any other tensors whose first axis is the
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
    """Return whether rows consist of tokens, so that some tokens can be held out."""
    return batch.ndim == 2 and not batch.is_floating_point()


def _tokens_in_row(batch: Tensor) -> int:
    return batch.shape[1] if _are_ids(batch) else 1


def _rows(batches: Sequence[Tensor]) -> tuple[list[tuple[int, int]], bool]:
    """Return rows to hold out, as pairs of a batch's number and a row's number, and whether they suffice.

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
    """Yield a hash of each row, independent of the dtype of token ids."""
    for row in batch.detach().cpu():
        content = (row.long() if _are_ids(batch) else row).contiguous()
        yield hashlib.blake2b(ctypes.string_at(content.data_ptr(), content.nbytes), digest_size=16).digest()


def _end_of_each(batch: Tensor) -> Tensor:
    """Return the last eighth of the tokens of each row, rounded; one token for rows of four to eleven."""
    tokens = _tokens_in_row(batch)
    wanted = max(1, round(tokens * LEAST_SHARE)) if tokens * MOST_SHARE >= 1 else 0
    return (torch.arange(tokens) >= tokens - wanted).expand(len(batch), -1)


def held_out_tokens(tokens: int) -> int:
    """Return how many of ``tokens`` tokens of a layer's input are held out for a rounding: the first ones.

    They are the beginning of a sequence. In many models, a token there has massive activations, and all
    others attend to it. This token dominates the statistics, and so the rounding, but tokens from the middle
    of sequences do not show its error. Neighbours of a held-out token are similar, so they are held out too.
    Experts get tokens without sequences; these are held out in the same way.
    """
    count = min(MOST_TOKENS, tokens // ONE_IN)
    return count if count >= FEWEST_TOKENS else 0


def held_out_ends(rows: Tensor) -> Tensor:
    """Return which tokens of a call are held out for a tuning, bool, ``[tokens]``.

    These are the last sixteenth of each sequence, or none. Whole sequences are not held out: a tuning
    loses more from a quarter less data than it gains from independent tokens.

    Args:
        rows: Number of the sequence of each token, ``[tokens]``, in ascending order.
    """
    counts = torch.bincount(rows)
    ends = counts.cumsum(0)[rows]
    from_the_end = ends - torch.arange(len(rows), device=rows.device)  # the last token has 1
    return from_the_end <= (counts // ONE_IN)[rows]
