"""Functions that remove the padding from calibration batches. This is done once, before the model is called.

The masks of a batch tell which positions are padding. These positions are removed from the batch's tensors,
and each sequence becomes a separate call. So no forward pass has padding, and observers, statistics, metrics
and mixture-of-experts layers need not consider it. A padded batch gives the same result as separate batches
with one sequence each and without padding.

The rules:

- The mask decides which positions are padding, never the token id. Without a mask, the model attends to pad
  tokens, too.
- A stream is the main input, or the set of all tensors whose names have the same prefix. Each mask applies to
  its own stream: ``attention_mask`` to the main input, ``decoder_attention_mask`` to the tensors called
  ``decoder_…``, and so on. So in cross-attention, the decoder's mask applies to queries. The encoder's mask
  applies to keys and values.
- In an encoder-decoder model that creates the decoder's input from ``labels``, the label -100 is padding.
- In a mask ``[batch, heads, queries, keys]``, a position is padding if it does not attend to itself. It is
  also padding if it attends only to itself and no other position attends to it.
- A sequence that has only padding gives no call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from quark.errors import CalibrationError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

MASK = "attention_mask"
_DECODER = "decoder_"
_LABELS, _NO_LABEL = "labels", -100
_POSITIONS = "position_ids"
"""Name of the position ids. The last two axes are batch and tokens. There may be a further first axis, for
the dimensions of an image.
"""
_BY_TOKEN = ("inputs_embeds", "hidden_states")
"""Suffixes of the names of float tensors that have a vector for each token. The shape alone is not enough to
tell: images may have the same shape by chance.
"""
_MASKED = -9_000.0
"""A float mask with more than two axes is added to the logits. A position is masked if its value is at most
this. Models use -10,000 or less; distance biases (ALiBi) have larger values.
"""


def main_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the tensor whose first axis is the batch, or None if there is no such tensor.

    The result is the first tensor in this list that the call has: a positional argument, the token ids, the
    embeddings of tokens, any other keyword argument that is not a mask.
    """
    named = [kwargs[name] for name in ("input_ids", "inputs_embeds") if name in kwargs]
    others = (value for name, value in kwargs.items() if not name.endswith("mask"))
    return next((v for v in (*args, *named, *others) if isinstance(v, Tensor) and v.ndim > 0), None)


def without_padding(args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: str, *, has_decoder: bool = False) -> Iterator[Arguments]:
    """Remove the padding from one batch, and yield the arguments of a call for each sequence.

    A batch without padding gives one call.

    Args:
        args: Positional arguments of the model; none of them is a mask.
        kwargs: Keyword arguments.
        batch: Name of the batch in error messages.
        has_decoder: Whether the model creates the decoder's input from ``labels`` if the batch has no input
            for the decoder.

    Raises:
        CalibrationError: The padding cannot be removed, because an argument does not have one row per
            sequence.
    """
    main = main_tensor(args, kwargs)
    streams = {} if main is None else _streams(main, kwargs, has_decoder)
    if main is None or all(counts is None or bool(counts.all()) for counts in streams.values()):
        yield args, dict(kwargs)
        return
    for number in range(len(main)):
        sequence = _Sequence(main, number, {p: None if counts is None else counts[number] for p, counts in streams.items()}, has_decoder)
        if all(counts is None or bool(counts.any()) for counts in sequence.counts.values()):
            try:
                yield tuple(sequence.part("", a) for a in args), {name: sequence.part(name, value) for name, value in kwargs.items()}
            except IndexError as error:
                raise CalibrationError(
                    f"'{error}' of {batch} does not have one row for each of the {len(main)} sequences, so their padding cannot be "
                    "removed. Give one sequence per batch"
                ) from None


def _streams(main: Tensor, kwargs: Mapping[str, Any], has_decoder: bool) -> dict[str, Tensor | None]:
    """Return which positions are not padding, as a dictionary from the prefix of tensor names to a bool
    tensor.

    The tensor has the shape ``[batch, tokens]`` and is on the CPU. It is None if there is no mask, or if no
    tensor has an axis for the mask's positions. For example, a spectrogram has no such axis, because the
    model reads it as a whole.
    """
    streams: dict[str, Tensor | None] = {"": None, _DECODER: None, "encoder_": None}
    for name, mask in kwargs.items():
        if not name.endswith(MASK):
            continue
        prefix = name.removesuffix(MASK)
        own = [v for n, v in kwargs.items() if n.startswith(prefix) and n != name] if prefix else [main]
        own += [kwargs[_LABELS]] if prefix == _DECODER and _LABELS in kwargs else []
        counts = _positions(mask)
        counts = counts.expand(len(main), -1) if counts is not None and len(counts) == 1 else counts
        fits = counts is not None and any(isinstance(v, Tensor) and v.shape[:2] == counts.shape for v in own)
        if own:
            streams[prefix] = counts if fits else None
    labels = kwargs.get(_LABELS)
    if has_decoder and isinstance(labels, Tensor) and labels.ndim == 2 and not any(name.startswith(_DECODER) for name in kwargs):
        streams[_DECODER] = labels.cpu() != _NO_LABEL
    return streams


@attrs.frozen(eq=False)
class _Sequence:
    """One sequence of a batch.

    Attributes:
        main: The tensor whose first axis is the batch.
        number: Index of the sequence's row in the batch.
        counts: A dictionary from the prefix of a stream to a mask ``[tokens]`` of the positions that are not
            padding. The mask is None if nothing is removed from the stream.
        has_decoder: As in `without_padding`.
    """

    main: Tensor
    number: int
    counts: Mapping[str, Tensor | None]
    has_decoder: bool

    def part(self, name: str, value: Any) -> Any:
        """Return the part of the argument ``value`` that belongs to the sequence, with a batch axis of size
        1.

        Raises:
            IndexError: The argument does not have one row for each sequence of the batch.
        """
        stream = _DECODER if name == _LABELS and self.has_decoder else max((p for p in self.counts if name.startswith(p)), key=len)
        if isinstance(value, list) and len(self.main) > 1:
            if len(value) != len(self.main):
                raise IndexError(name)
            return value[self.number : self.number + 1]
        return tree_map_only(Tensor, partial(self._part, name, stream), value)

    def _part(self, name: str, stream: str, x: Tensor) -> Tensor:
        counts = self.counts[stream]
        batch_axis, axes = (0, []) if counts is None else self._axes(name, x, len(counts), is_mask=name == stream + MASK)
        if batch_axis is not None and x.ndim and len(self.main) > 1 and x.shape[batch_axis] != 1:
            if x.shape[batch_axis] != len(self.main):
                raise IndexError(name or "input")
            x = x.narrow(batch_axis, self.number, 1)
        if counts is not None:
            positions = counts.nonzero().squeeze(1).to(x.device)
            for axis in axes:
                x = x.index_select(axis, positions)
        return x

    def _axes(self, name: str, x: Tensor, tokens: int, *, is_mask: bool) -> tuple[int | None, list[int]]:
        """Return the batch axis of a tensor, and the axes along which padding is removed.

        The batch axis is None if the tensor has only an axis of tokens.
        """
        batch = len(self.main)
        if x.ndim == 1 and len(x) == tokens != batch:
            return None, [0]
        if is_mask and x.ndim > 2:
            return 0, [axis for axis in (x.ndim - 2, x.ndim - 1) if x.shape[axis] == tokens]
        if not x.is_floating_point() or x.ndim == 2 or x is self.main or name.endswith(_BY_TOKEN):
            pairs = [axis for axis in range(x.ndim - 1) if x.shape[axis] in (1, batch) and x.shape[axis + 1] == tokens]
            if pairs:
                axis = pairs[-1 if name == _POSITIONS else 0]
                return axis, [axis + 1]
        return 0, []


def _positions(mask: Any) -> Tensor | None:
    """Return which positions are not padding according to ``mask``, as a bool tensor
    ``[batch or 1, tokens]``.

    Return None if the mask has no usable shape. If ``mask`` has several masks, one for each kind of layer,
    the first mask is used.
    """
    mask = next((leaf for leaf in tree_leaves(mask) if isinstance(leaf, Tensor)), None)
    if mask is None or mask.ndim not in (2, 3, 4):
        return None
    mask = mask.detach().cpu()
    is_added = mask.is_floating_point() and mask.ndim > 2 and bool((mask < 0).any() | (mask <= 0).all())
    allowed = mask > _MASKED if is_added else mask != 0
    if mask.ndim == 2:
        return allowed
    allowed = allowed if mask.ndim == 3 else allowed.any(1)
    if allowed.shape[1] == 1:
        return allowed[:, 0]
    return _attended(allowed) if allowed.shape[1] == allowed.shape[2] else None


def _attended(allowed: Tensor) -> Tensor:
    """Return which positions are not padding, as a bool tensor ``[batch, tokens]``.

    Padding must be recognized even if it attends to some keys. Models often let a query that has no keys
    attend to all keys, or to itself, so that the softmax is finite.

    Args:
        allowed: Which keys each query may attend to, bool, ``[batch, queries, keys]``.
    """
    is_open = allowed.all(2) & (allowed.triu(1) & ~allowed.mT).any(2)
    counts = allowed.diagonal(dim1=1, dim2=2) & ~is_open
    linked = (allowed | allowed.mT) & counts[:, :, None] & counts[:, None] & ~torch.eye(allowed.shape[1], dtype=torch.bool)
    return counts & (linked.any(2) | ~linked.any((1, 2))[:, None])
