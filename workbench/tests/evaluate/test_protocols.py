"""Each protocol against a plain program of its source, on a model whose predictions are known."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from quark.errors import ConfigError
from quark_workbench.evaluate import PROTOCOLS, likelihood, protocol_of, scored_windows
from quark_workbench.evaluate.windows import Windows

VOCABULARY, BOS = 128, 1


class Letters:
    """A tokenizer of code points; with ``bos`` it puts 1 before a text."""

    def __init__(self, *, bos: bool = True) -> None:
        self.bos, self.bos_token_id, self.eos_token_id = bos, BOS if bos else None, 2

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, Any]:
        return {"input_ids": [BOS] * (self.bos and add_special_tokens) + [ord(c) for c in text]}


class Recent(nn.Module):
    """A causal model that predicts by the mean of all tokens so far, so that context matters."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=g, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[ids].cumsum(1) / torch.arange(1, ids.shape[1] + 1)[None, :, None]


MODEL = Recent()
TEXT = "the quick brown fox jumps over the lazy dog " * 6


def nats(tokens: list[int]) -> list[float]:
    """Negative log-likelihood of every token but the first, given those before it."""
    with torch.no_grad():
        log_p = MODEL(torch.tensor([tokens]))[0].log_softmax(-1)
    return [-float(log_p[i, t]) for i, t in enumerate(tokens[1:])]


def found(protocol: str, text: str = TEXT, *, bos: bool = True, limit: int | None = None, **changes: Any) -> float:
    windows = scored_windows(Letters(bos=bos), text, protocol_of(protocol, **changes), limit)
    return likelihood(MODEL, windows.split(3)).perplexity.value


def ids(text: str = TEXT) -> list[int]:
    return [ord(c) for c in text]


@pytest.mark.parametrize("bos", [False, True])
def test_gptq_scores_windows_of_one_text_without_overlap(bos: bool) -> None:
    tokens, length, losses = [BOS] * bos + ids(), 32, []
    for i in range(len(tokens) // length):
        losses.append(sum(nats(tokens[i * length : (i + 1) * length])) / (length - 1))
    assert found("wikitext", bos=bos, seq_len=length) == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-9)


@pytest.mark.parametrize("bos", [False, True])
def test_llama_cpp_scores_the_second_half_with_bos_in_place_of_the_first_token(bos: bool) -> None:
    tokens, length = [BOS] * bos + ids(), 32
    total, count = 0.0, 0
    for i in range(len(tokens) // length):
        window = tokens[i * length : (i + 1) * length]
        window[0] = BOS if bos else window[0]
        total += sum(nats(window)[length // 2 :])
        count += length - 1 - length // 2
    assert found("llama.cpp", bos=bos, seq_len=length) == pytest.approx(math.exp(total / count), rel=1e-9)


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("length", [7, 32, 100, 264, 1000])
def test_lm_eval_scores_every_token_once_and_gives_perplexity_per_word(bos: bool, length: int) -> None:
    tokens, prefix, total, done = ids(), BOS if bos else 2, 0.0, 0
    while done < len(tokens):
        count = min(len(tokens) - done, length)
        end = done + count
        context = [prefix, *tokens][max(0, end - length) : end + 1]
        total += sum(nats(context)[-count:])
        done = end
    words = len(re.split(r"\s+", TEXT))
    assert found("lm-eval", bos=bos, seq_len=length) == pytest.approx(math.exp(total / words), rel=1e-9)


def test_with_a_stride_each_window_scores_what_no_earlier_one_has() -> None:
    tokens, length, stride, total, count = ids(), 32, 8, 0.0, 0
    for start in range(0, len(tokens) - length + 1, stride):
        scores = nats(tokens[start : start + length])
        new = scores if start == 0 else scores[-stride:]
        total, count = total + sum(new), count + len(new)
    assert found("quark", bos=False, seq_len=length, stride=stride) == pytest.approx(math.exp(total / count), rel=1e-9)


@given(st.integers(2, 40), st.integers(1, 40), st.sampled_from(["auto", "each", "first", "none"]), st.booleans())
def test_no_token_of_the_text_is_scored_twice(length: int, stride: int, bos: str, has_bos: bool) -> None:
    if stride > length or (bos == "each" and not has_bos):
        return
    text = "".join(chr(33 + i) for i in range(90))  # every token differs
    windows = scored_windows(Letters(bos=has_bos), text, protocol_of("quark", seq_len=length, stride=stride, bos=bos))
    scored = windows.tokens[:, 1:][windows.scored].tolist()
    assert len(set(scored)) == len(scored)
    assert BOS not in scored
    assert windows.tokens.shape[1] == length


@given(st.integers(2, 200))
def test_rolling_windows_score_the_whole_text_in_order(length: int) -> None:
    text = "".join(chr(33 + i) for i in range(90))
    windows = scored_windows(Letters(), text, protocol_of("lm-eval", seq_len=length))
    assert windows.tokens[:, 1:][windows.scored].tolist() == ids(text)
    assert windows.tokens.shape[1] <= length + 1


def test_a_limit_keeps_the_first_windows() -> None:
    few, all_of_them = (scored_windows(Letters(), TEXT, protocol_of("wikitext", seq_len=16), limit) for limit in (3, None))
    assert isinstance(few, Windows)
    assert few.tokens.tolist() == all_of_them.tokens[:3].tolist()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: protocol_of("wikitex"), "use one of quark, wikitext, llama.cpp, lm-eval"),
        (lambda: protocol_of("wikitext", seq_len=1), "at least 2"),
        (lambda: protocol_of("wikitext", seq_len=8, stride=9), "stride=9 must be between 1 and the sequence length, 8"),
        (lambda: protocol_of("wikitext", seq_len=8, score_from=8), "leaves no token"),
        (lambda: protocol_of("wikitext", bos="always"), "use one of auto, each, first, none"),
        (lambda: protocol_of("lm-eval", stride=4), "scores each token once"),
        (lambda: scored_windows(Letters(), TEXT, protocol_of("lm-eval"), 3), "leave the limit out"),
        (lambda: scored_windows(Letters(bos=False), TEXT, protocol_of("quark", bos="each")), "no BOS token"),
        (lambda: scored_windows(Letters(), "  ", protocol_of("lm-eval")), "the text is empty"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_every_protocol_has_its_name_and_a_line_about_it() -> None:
    assert all(protocol.name == name and protocol.about for name, protocol in PROTOCOLS.items())
