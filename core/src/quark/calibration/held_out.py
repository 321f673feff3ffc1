"""Functions that choose the calibration tokens that are held out.

An algorithm validates its decisions on tokens that it was not fitted to. Three kinds of algorithms choose
these tokens by three rules:

- `held_out` is for transforms. The validation of a transform compares the outputs of a block. Whole sequences
  are held out. Together, they have between an eighth and a quarter of all tokens. The choice depends only on
  the contents of the sequences, and not on the order or the batches.
- `held_out_tokens` is for roundings. The validation of a rounding compares the outputs of one layer. The
  first tokens of each input are held out: one in sixteen, at most 128.
- `held_out_ends` is for tunings. The validation of a tuning compares the outputs of a block. A tuning fits so
  many parameters that it needs tokens from every sequence, so the end of each sequence is held out.

`quark.algorithms.validation` compares two errors on such tokens.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

LEAST_SHARE = 1 / 8
"""Minimum share of the tokens that is held out for transforms."""
MOST_SHARE = 1 / 4
"""Maximum share of the tokens that is held out for transforms. Statistics cannot use held-out tokens."""
FEWEST_SEQUENCES = 2
"""Minimum number of held-out sequences, if whole sequences are held out. One sequence would not be
representative.
"""

ONE_IN = 16
"""One in this many tokens is held out for roundings. This changes the statistics by less than their noise."""
MOST_TOKENS = 128
"""Maximum number of tokens that are held out for a rounding. More are not needed to compare two roundings."""
FEWEST_TOKENS = 4
"""Minimum number of held-out tokens; with fewer, the comparison would be noise."""
TOKENS_PER_CHANNEL = 2
"""If there are at least this many tokens per input channel, statistics use the held-out tokens, too.

With so many tokens, codes hardly overfit single tokens. On SmolLM2, leaving 128 of 2,048 tokens out of the
statistics cost more than validation on unseen tokens could gain.
"""


def held_out(batches: Sequence[Tensor]) -> list[Tensor]:
    """Return a mask of the held-out tokens for each batch.

    Each mask is a bool tensor on the CPU. Its shape is ``[batch, tokens]`` for token ids, and ``[batch, 1]``
    for batches whose rows are not tokens, such as images.

    If there are enough sequences (eight, if all have the same length), whole sequences are held out. These
    are the sequences whose contents have the smallest hashes. Sequences with equal contents are held out
    together. If there are fewer sequences, the last eighth of the tokens of each sequence is held out. If
    neither is possible, for example if the data is a single image, all masks are False.

    Args:
        batches: All batches. A batch has token ids ``[batch, tokens]``, or is any other tensor whose first
            axis is the batch.
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
    """Return whether the rows of ``batch`` are token ids, so that a part of a row can be held out."""
    return batch.ndim == 2 and not batch.is_floating_point()


def _tokens_in_row(batch: Tensor) -> int:
    return batch.shape[1] if _are_ids(batch) else 1


def _rows(batches: Sequence[Tensor]) -> tuple[list[tuple[int, int]], bool]:
    """Return the rows to hold out, and whether there are enough of these rows.

    A row is a pair of two indices: the index of the batch, and the index of the row in that batch. The share
    of all tokens that is in the returned rows is at most `MOST_SHARE`.
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
    """Yield a hash of each row. The hash of token ids does not depend on their dtype."""
    for row in batch.detach().cpu():
        content = (row.long() if _are_ids(batch) else row).contiguous()
        yield hashlib.blake2b(ctypes.string_at(content.data_ptr(), content.nbytes), digest_size=16).digest()


def _end_of_each(batch: Tensor) -> Tensor:
    """Return a mask of the last eighth of the tokens of each row.

    The eighth is rounded to a whole number of tokens. In a row of 4 to 11 tokens, this is one token. In a
    shorter row, no token is in the mask.
    """
    tokens = _tokens_in_row(batch)
    wanted = max(1, round(tokens * LEAST_SHARE)) if tokens * MOST_SHARE >= 1 else 0
    return (torch.arange(tokens) >= tokens - wanted).expand(len(batch), -1)


def held_out_tokens(tokens: int) -> int:
    """Return how many of the ``tokens`` tokens of a layer's input are held out for a rounding.

    The first tokens are held out, so they include the beginning of a sequence. In many models, a token at the
    beginning has massive activations, and all other tokens attend to it. This token dominates the statistics
    and therefore the rounding, but tokens from the middle of sequences do not show its error. Neighbouring
    tokens are similar, so neighbours are held out together. The inputs of experts are not divided into
    sequences. Their first tokens are held out too.
    """
    count = min(MOST_TOKENS, tokens // ONE_IN)
    return count if count >= FEWEST_TOKENS else 0


def held_out_ends(rows: Tensor) -> Tensor:
    """Return a mask of the tokens of a call that are held out for a tuning, as a bool tensor ``[tokens]``.

    The last sixteenth of each sequence is held out, rounded down to a whole number of tokens. Whole sequences
    are not held out. They would make the validation more independent, but a tuning would lose a quarter of
    its data, and this loss is larger.

    Args:
        rows: For each token, the number of its sequence, ``[tokens]``, in ascending order.
    """
    counts = torch.bincount(rows)
    ends = counts.cumsum(0)[rows]
    from_the_end = ends - torch.arange(len(rows), device=rows.device)  # the last token has 1
    return from_the_end <= (counts // ONE_IN)[rows]
