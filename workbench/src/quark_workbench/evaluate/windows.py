"""Windows: pieces of a tokenized text, with the tokens whose predictions are scored."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.errors import ConfigError
from quark_workbench.evaluate.protocol import PROTOCOLS, Protocol

__all__ = ["Windows", "scored_windows", "token_windows"]

_CHARACTERS_PER_TOKEN = 8  # more than tokenizers usually need; with a limit, only this many characters of the text are tokenized


@attrs.frozen(eq=False)
class Windows:
    """N windows of T tokens each.

    Attributes:
        tokens: The token ids, ``[N, T]``, int64. The model gets all tokens of a window but the last.
        first: The position of each window's first scored token, ``[N]``, int64, from 1 to T − 1. All later
            tokens of the window are scored too.
        words: Number of words of the text if results are per word; None if results are per token.
    """

    tokens: Tensor
    first: Tensor
    words: int | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def scored(self) -> Tensor:
        """A boolean tensor ``[N, T − 1]`` that says which tokens after the first one are scored."""
        return torch.arange(1, self.tokens.shape[1]) >= self.first[:, None]

    def logits(self, model: nn.Module) -> Tensor:
        """Return the logits ``[N, T − 1, V]`` with which a model predicts each token but the first.

        The model gets only the token ids, without the last token of each window. It returns logits, or an
        object with an attribute ``logits``.
        """
        parameter, inputs = next(model.parameters(), None), self.tokens[:, :-1]
        output: Any = model(inputs if parameter is None else inputs.to(parameter.device))
        logits: Tensor = getattr(output, "logits", output)
        return logits

    def split(self, size: int) -> Iterator[Windows]:
        """Yield batches of at most ``size`` windows, in order."""
        for tokens, first in zip(self.tokens.split(size), self.first.split(size), strict=True):
            yield Windows(tokens, first, self.words)


def token_windows(tokenizer: Any, text: str, length: int, limit: int | None = None) -> Tensor:
    """Return the windows of a text under the protocol ``"quark"``, as an int64 tensor ``[N, length]``.

    The windows do not overlap. ``length`` is the number of tokens in a window. Other arguments and the errors
    are as in `scored_windows`.
    """
    return scored_windows(tokenizer, text, attrs.evolve(PROTOCOLS["quark"], seq_len=length), limit).tokens


def scored_windows(tokenizer: Any, text: str, protocol: Protocol, limit: int | None = None) -> Windows:
    """Return the windows into which a protocol cuts a text.

    Args:
        tokenizer: A transformers tokenizer.
        text: Any text.
        protocol: The protocol of the windows.
        limit: The largest number of windows, from the start of the text; None for all windows. It must be
            None if results are per word.

    Raises:
        ConfigError: The limit is below 1 or not allowed, or the text is too short for one window.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"a limit of {limit} windows leaves nothing to evaluate: give at least 1")
    if limit is not None and protocol.is_rolling:
        raise ConfigError(f"the protocol '{protocol.name}' scores the whole text, per word: leave the limit out, or give a shorter text")
    if not text.strip():
        raise ConfigError("the text is empty: give a text with words")
    return _rolling(tokenizer, text, protocol) if protocol.is_rolling else _overlapping(tokenizer, text, protocol, limit)


def _overlapping(tokenizer: Any, text: str, protocol: Protocol, limit: int | None) -> Windows:
    """Return windows that start every ``stride`` tokens. An incomplete last window is dropped."""
    length, stride = protocol.seq_len, protocol.stride or protocol.seq_len
    bos = _bos(tokenizer, protocol)
    inserted = [bos] if protocol.bos in ("auto", "each") and bos is not None and not protocol.bos_replaces else []
    start = [bos] if (protocol.bos == "first" or protocol.bos_replaces) and bos is not None else []
    fill, step = length - len(inserted), stride - len(inserted) if stride == length else stride
    wanted = None if limit is None else (limit - 1) * step + fill
    tokens = torch.cat([torch.tensor(start, dtype=torch.int64), _tokens(tokenizer, text, wanted)])[:wanted]
    if len(tokens) < fill:
        raise ConfigError(f"the text has {len(tokens)} tokens, fewer than one window of {fill}: give more text or shorter windows")
    windows = tokens.unfold(0, fill, step).contiguous()
    if inserted:
        windows = torch.nn.functional.pad(windows, (len(inserted), 0), value=inserted[0])
    elif protocol.bos == "each" and bos is not None:
        windows[:, 0] = bos
    first = torch.full((len(windows),), max(1, protocol.first_scored, length - stride))
    first[0] = max(1, protocol.first_scored)  # no earlier window has scored the beginning of the first
    return Windows(windows, first)


def _rolling(tokenizer: Any, text: str, protocol: Protocol) -> Windows:
    """Return windows in which each token is scored once, as in lm-evaluation-harness.

    A BOS or EOS token precedes the text. The last window has the full length, so it also has tokens that the
    window before has scored.

    Source: ``get_rolling_token_windows`` with ``context_len=1`` and ``word_perplexity`` of
    lm-evaluation-harness.
    """
    prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if prefix is None:
        raise ConfigError(
            f"the protocol '{protocol.name}' begins with a BOS or EOS token, but this tokenizer has neither: use another protocol"
        )
    tokens = torch.cat([torch.tensor([prefix]), _tokens(tokenizer, text, None)])
    length = min(protocol.seq_len + 1, len(tokens))  # the model reads one token less
    ends = [*range(length, len(tokens), length - 1), len(tokens)]
    windows = torch.stack([tokens[end - length : end] for end in ends])
    done = torch.tensor([1, *ends[:-1]])  # position in the text of the first token that is not scored yet
    return Windows(windows, done - torch.tensor(ends) + length, words=len(re.split(r"\s+", text)))


def _bos(tokenizer: Any, protocol: Protocol) -> int | None:
    """Return the id of the BOS token that windows of the protocol get, or None if they get no BOS.

    Raises:
        ConfigError: The protocol needs BOS, but the tokenizer has none.
    """
    bos: int | None = tokenizer.bos_token_id
    if protocol.bos == "auto" or protocol.bos_replaces:  # if the tokenizer adds BOS, the model was trained with it
        return bos if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else None
    if protocol.bos == "first" and bos is not None:
        return bos if tokenizer("a")["input_ids"][:1] == [bos] else None
    if protocol.bos == "each" and bos is None:
        raise ConfigError("the tokenizer has no BOS token to begin each window with: use bos='none'")
    return None if protocol.bos == "none" else bos


def _tokens(tokenizer: Any, text: str, wanted: int | None) -> Tensor:
    """Return at least the first ``wanted`` tokens of a text, or all tokens if the text has fewer.

    If ``wanted`` is None, return all tokens.
    """
    for part in (text,) if wanted is None else (text[: wanted * _CHARACTERS_PER_TOKEN], text):
        # verbose=False: no warning for a text longer than the model's context, since it is cut afterwards.
        tokens = torch.tensor(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64)
        if wanted is not None and len(tokens) > wanted:
            break  # one extra, since the last token may be part of a word
    return tokens
