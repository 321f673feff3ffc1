"""Splitting of a text into windows of tokens of equal length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quark.errors import ConfigError

__all__ = ["token_windows"]

_CHARACTERS_PER_TOKEN = 8  # generous for any tokenizer: with a limit, no more text than needed is tokenized


def token_windows(tokenizer: Any, text: str, length: int, limit: int | None = None) -> Tensor:
    """Return consecutive windows of a text without overlap, ``[N, length]``, int64; an incomplete last window is dropped.

    Where the tokenizer puts a BOS token before a text by default, the model was trained with it, so each window begins with BOS and holds
    ``length − 1`` tokens of the text. Otherwise windows hold the text alone. No other special token is added.

    Args:
        tokenizer: A transformers tokenizer.
        text: Any text.
        length: Tokens of a window, at least 2.
        limit: The largest number of windows, from the start; None takes all.

    Raises:
        ConfigError: ``length`` or ``limit`` is too small, the text is empty, or it does not fill one window.
    """
    if length < 2:
        raise ConfigError(f"a window of {length} token(s) predicts nothing: the sequence length must be at least 2")
    if limit is not None and limit < 1:
        raise ConfigError(f"a limit of {limit} windows leaves nothing to evaluate: it must be at least 1")
    if not text.strip():
        raise ConfigError("the text is empty: nothing can be evaluated on it")
    start = [tokenizer.bos_token_id] if _begins_with_bos(tokenizer) else []
    fill = length - len(start)
    wanted = None if limit is None else limit * fill
    tokens = _tokens(tokenizer, text, wanted)[:wanted]
    windows = tokens[: len(tokens) // fill * fill].view(-1, fill)
    if len(windows) == 0:
        raise ConfigError(f"the text has {len(tokens)} tokens, fewer than one window of {fill}: give more text or shorter windows")
    return torch.cat([torch.tensor(start, dtype=torch.int64).expand(len(windows), -1), windows], dim=1)


def _begins_with_bos(tokenizer: Any) -> bool:
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


def _tokens(tokenizer: Any, text: str, wanted: int | None) -> Tensor:
    """Return the tokens of the text, or of its beginning if that gives the wanted number of tokens."""
    for part in (text,) if wanted is None else (text[: wanted * _CHARACTERS_PER_TOKEN], text):
        # verbose=False: no warning for a text longer than the model's context, since it is cut afterwards.
        tokens = torch.tensor(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64)
        if wanted is not None and len(tokens) > wanted:
            break  # one more than wanted, since the last one may be half a word
    return tokens
