"""Token sequences for calibration, which are cut from all samples together or each from one sample."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from quark.errors import CalibrationError
from quark_workbench.data.samples import Sample, rendered

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["token_sequences"]

_CHARACTERS_PER_TOKEN = 8  # more than tokenizers usually need; the rest of a text is not tokenized


def token_sequences(
    tokenizer: Any,
    samples: Iterable[Sample],
    count: int = 128,
    length: int = 512,
    *,
    packing: bool = True,
    batch_size: int = 1,
    seed: int | None = None,
) -> list[Any]:
    """Return batches of token sequences, which are calibration data for `quark.runs.ModelQuantizer`.

    Args:
        tokenizer: A transformers tokenizer. If it adds BOS to a text, the sequences have BOS too.
        samples: Texts or chats. No more samples are read than are needed.
        count: The largest number of sequences.
        length: Number of tokens in a sequence.
        packing: Whether to join the tokens of all samples and cut them every ``length`` tokens. The last
            sequence may then be shorter. Without packing, each sequence is one sample, and tokens after the
            first ``length`` are dropped.
        batch_size: Number of sequences in a batch. If the sequences of a batch differ in length, the shorter
            ones are padded at the end, and the batch has an attention mask.
        seed: Seed with which the samples are shuffled. With packing, a single sample is cut, and ``count`` of
            its sequences are drawn. None keeps the order of the samples.

    Returns:
        The batches. Each is an int64 tensor ``[batch, tokens]``, or a dictionary with ``input_ids`` and
        ``attention_mask`` if it has padding.

    Raises:
        CalibrationError: ``tokenizer`` is None, the samples have no tokens, a number is below 1, or the
            tokenizer cannot turn a chat into text.
    """
    if tokenizer is None:
        raise CalibrationError(
            "the checkpoint has no tokenizer, so text cannot be turned into tokens: use the Python interface with token tensors"
        )
    for name, number in (("count", count), ("length", length), ("batch_size", batch_size)):
        if number < 1:
            raise CalibrationError(f"{name}={number} leaves no calibration data: give 1 or more")
    draws = False
    if seed is not None:
        samples = list(samples)
        random.Random(seed).shuffle(samples)
        draws = packing and len(samples) == 1
    rows = list(_packed(tokenizer, samples, None if draws else count, length) if packing else _apart(tokenizer, samples, count, length))
    if draws:
        rows = random.Random(seed).sample(rows, min(count, len(rows)))
    if not rows:
        raise CalibrationError("the calibration data have no tokens: give text that is not empty")
    return [_batch(tokenizer, rows[i : i + batch_size]) for i in range(0, len(rows), batch_size)]


def _packed(tokenizer: Any, samples: Iterable[Sample], count: int | None, length: int) -> Iterator[list[int]]:
    """Join the tokens of all samples, and yield up to ``count`` sequences of ``length`` tokens from them."""
    waiting: list[int] = []
    left = None if count is None else count * length
    for sample in samples:
        if left is not None and left <= 0:
            break
        ids = _tokens(tokenizer, sample, left)
        waiting += ids
        left = None if left is None else left - len(ids)
        while len(waiting) >= length:
            yield waiting[:length]
            waiting = waiting[length:]
    if waiting:
        yield waiting


def _apart(tokenizer: Any, samples: Iterable[Sample], count: int, length: int) -> Iterator[list[int]]:
    """Yield the first ``length`` tokens of each of ``count`` samples. Samples without a token are skipped."""
    for sample in samples:
        if count == 0:
            break
        if ids := _tokens(tokenizer, sample, length):
            count -= 1
            yield ids


def _tokens(tokenizer: Any, sample: Sample, most: int | None) -> list[int]:
    """Return the first ``most`` tokens of a sample, or all its tokens if ``most`` is None."""
    text = rendered(tokenizer, sample)
    text = text if most is None else text[: most * _CHARACTERS_PER_TOKEN]
    # A chat template writes its special tokens itself. verbose=False: no warning for a text longer than the
    # model's context.
    ids: list[int] = tokenizer(text, add_special_tokens=isinstance(sample, str), verbose=False)["input_ids"]
    return ids[:most]


def _batch(tokenizer: Any, rows: list[list[int]]) -> Tensor | dict[str, Tensor]:
    """Return one batch with these sequences. The batch is padded if the sequences differ in length."""
    import torch  # imported here: listings of data sources do without it

    longest = max(map(len, rows))
    if all(len(row) == longest for row in rows):
        return torch.tensor(rows)
    padding = next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
    return {
        "input_ids": torch.tensor([row + [padding] * (longest - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows]),
    }
