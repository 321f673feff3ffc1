"""Protocols of perplexity, which say how a text is cut into windows, where BOS is, and what is scored.

Perplexities under different protocols cannot be compared. For the same model and text, they differ by tens of
percent.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs
from attrs import validators

from quark.errors import ConfigError

__all__ = ["PROTOCOLS", "Protocol", "protocol_of"]

BOS = ("auto", "each", "first", "none")


def _window(_: Any, __: Any, value: int) -> None:
    if value < 2:
        raise ConfigError(f"a window of {value} token(s) predicts nothing: the sequence length must be at least 2")


@attrs.frozen(kw_only=True)
class Protocol:
    """The rules by which a text is evaluated.

    Attributes:
        name: The name that results show.
        seq_len: Number of tokens in a window, including BOS; at least 2.
        stride: Number of tokens from the start of a window to the start of the next window, at most
            ``seq_len``. If windows overlap, a window scores only tokens that no earlier window has scored.
            None means that windows do not overlap.
        bos: The windows that begin with BOS. ``"each"`` means all windows, and ``"none"`` no window. If the
            tokenizer adds BOS to texts, ``"first"`` means the first window, and ``"auto"`` all windows.
            If the tokenizer adds no BOS, ``"first"`` and ``"auto"`` mean no window.
        bos_replaces: Whether BOS takes the place of a window's first token instead of preceding this token.
            This has an effect only if the tokenizer adds BOS to texts.
        score_from: The position in a window at which scoring begins. A number below 1 is a share of
            ``seq_len``; a larger number is a number of tokens.
        is_rolling: Whether each token of the text is scored exactly once. A prefix token then precedes the
            text, and results are per word.
        about: Description in one line.

    Raises:
        ConfigError: (a ValueError) A value is out of its range.
    """

    name: str
    seq_len: int = attrs.field(default=2048, validator=_window)
    stride: int | None = None
    bos: str = attrs.field(default="auto", validator=validators.in_(BOS))
    bos_replaces: bool = False
    score_from: float = 0.0
    is_rolling: bool = False
    about: str = ""

    def __attrs_post_init__(self) -> None:
        if self.stride is not None and not 1 <= self.stride <= self.seq_len:
            raise ConfigError(f"stride={self.stride} must be between 1 and the sequence length, {self.seq_len}")
        if not 0 <= self.first_scored < self.seq_len:
            raise ConfigError(f"score_from={self.score_from} leaves no token to score in a window of {self.seq_len}: give a smaller value")
        if self.is_rolling and (self.stride is not None or self.score_from or self.bos != "auto"):
            raise ConfigError(f"the protocol '{self.name}' scores each token once: leave out stride, bos and score_from")

    @property
    def first_scored(self) -> int:
        """The position in a window of the first token that may be scored; 0 if every token may be scored."""
        if self.score_from < 1:
            # llama.cpp scores what follows the token in the middle.
            return int(self.seq_len * self.score_from) + 1 if self.score_from > 0 else 0
        return int(self.score_from)


_PROTOCOLS = (
    Protocol(name="quark", seq_len=512, about="windows without overlap, each with BOS if the tokenizer has one; every token is scored"),
    Protocol(name="wikitext", bos="first", about="GPTQ's paper and code on WikiText: one text, BOS at its beginning, windows of 2048"),
    Protocol(
        name="llama.cpp",
        seq_len=512,
        bos="each",
        bos_replaces=True,
        score_from=0.5,
        about="llama-perplexity: windows of 512, BOS instead of the first token; the second half of each is scored",
    ),
    Protocol(
        name="lm-eval", is_rolling=True, about="lm-evaluation-harness: every token is scored once, in rolling windows; perplexity per word"
    ),
)
PROTOCOLS: Mapping[str, Protocol] = MappingProxyType({protocol.name: protocol for protocol in _PROTOCOLS})
"""The protocols by name.

Sources: arXiv 2210.17323 and its code; ``tools/perplexity`` of llama.cpp; lm-evaluation-harness.
"""


def protocol_of(name: str, **changes: Any) -> Protocol:
    """Return the protocol ``name`` with changed attributes. A change to None is ignored.

    >>> protocol_of("wikitext", seq_len=4096, stride=None).seq_len
    4096

    Raises:
        ConfigError: (a ValueError) There is no such protocol, or a value is out of its range.
    """
    if name not in PROTOCOLS:
        raise ConfigError(f"there is no protocol {name!r}: use one of {', '.join(PROTOCOLS)}")
    given = {key: value for key, value in changes.items() if value is not None}
    if "bos" in given and given["bos"] not in BOS:
        raise ConfigError(f"bos={given['bos']!r} is unknown: use one of {', '.join(BOS)}")
    if "bos" in given:
        given["bos_replaces"] = False
    return attrs.evolve(PROTOCOLS[name], **given)
