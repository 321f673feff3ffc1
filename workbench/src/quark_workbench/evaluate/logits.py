"""The next-token logits of a model, for each batch of windows, at the positions before the scored tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quark.errors import ConfigError, NonFiniteError
from quark_workbench.evaluate.windows import Windows

__all__ = ["NextTokens", "evaluating", "in_chunks", "log_probabilities", "next_token_logits", "windows_of"]

_CHUNK_ELEMENTS = 1 << 24  # logits processed at a time: 64 MiB in float32, whatever the vocabulary


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Set models to evaluation mode and turn gradients off, for the body of the ``with`` statement.

    Afterwards, each module has its earlier mode again.
    """
    training = [module for model in models for module in model.modules() if module.training]
    try:
        for model in models:
            model.eval()
        with torch.no_grad():  # not inference mode: tensors that a module creates at its first call must stay usable afterwards
            yield
    finally:
        for module in training:
            module.training = True


def windows_of(batches: Iterable[Tensor | Windows]) -> Iterator[Windows]:
    """Yield each batch as a `Windows` object. A tensor of tokens is converted.

    Each row of such a tensor becomes a window in which all tokens but the first are scored.

    Raises:
        ConfigError: A batch is not an integer matrix ``[sequences, tokens]`` with at least two tokens per
            sequence.
    """
    for batch in batches:
        yield batch if isinstance(batch, Windows) else Windows(checked := _checked(batch), torch.ones(len(checked), dtype=torch.int64))


def _checked(batch: Tensor) -> Tensor:
    if not isinstance(batch, Tensor) or batch.dim() != 2 or batch.shape[1] < 2 or batch.is_floating_point():
        what = f"a tensor of shape {list(batch.shape)} and {batch.dtype}" if isinstance(batch, Tensor) else f"a {type(batch).__name__}"
        raise ConfigError(f"a batch must be an integer tensor [sequences, tokens ≥ 2], not {what}: give token ids")
    return batch


class NextTokens(NamedTuple):
    """Logits that predict N scored tokens.

    The fields are the logits ``[N, V]``, the right tokens ``[N]``, and the number of each token's window
    ``[N]``.
    """

    logits: Tensor
    targets: Tensor
    window: Tensor


def next_token_logits(model: nn.Module, windows: Windows) -> NextTokens:
    """Run a model on windows, and return the logits of the scored tokens as `NextTokens`.

    The logits are in the dtype and on the device of the model's output. The other two tensors are on the CPU.
    """
    logits, scored = windows.logits(model), windows.scored
    index = torch.arange(len(windows))[:, None].expand(scored.shape)
    return NextTokens(logits[scored.to(logits.device)], windows.tokens[:, 1:].cpu()[scored], index[scored])


def in_chunks(*rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split all tensors along axis 0 at the same positions, and yield a tuple of their pieces for each chunk.

    A piece of the first tensor has at most `_CHUNK_ELEMENTS` elements, or one row.
    """
    size = max(1, _CHUNK_ELEMENTS // max(1, rows[0][0].numel()))
    yield from zip(*(r.split(size) for r in rows), strict=True)


def log_probabilities(logits: Tensor, whose: str) -> Tensor:
    """Return the log-softmax over the last axis, in float32 or a wider dtype.

    ``whose`` names the model in the message.

    Raises:
        NonFiniteError: A logit is NaN or +Inf. A logit of −Inf is allowed, because it excludes a token.
    """
    total = float(logits.sum(dtype=torch.float64))
    if math.isnan(total) or total == math.inf:
        raise NonFiniteError(
            f"the logits of the {whose} hold NaN or Inf, so no metric can be computed: try another dtype or scheme", tensor="logits"
        )
    return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
