"""A padded batch gives the same calls, to the bit, as its sequences unpadded and one by one.

This holds for any side, amount and token id of padding, and for any argument that marks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import quark_tiny_model as tiny
from quark.calibration.batches import Call, calls
from quark.calibration.padding import main_tensor
from quark.errors import CalibrationError

VOCABULARY = 1024
LOWEST = torch.finfo(torch.float32).min
Batch = dict[str, Any]
MODEL = tiny.tiny_model(blocks=1)


def added(allowed: Tensor, value: float = LOWEST) -> Tensor:
    return torch.where(allowed, 0.0, value)


def causal(keys: Tensor) -> Tensor:
    return keys[:, None, None] & torch.ones(keys.shape[1], keys.shape[1], dtype=torch.bool).tril()


def opened(allowed: Tensor) -> Tensor:
    """Let queries without keys see all keys, as transformers does for fused kernels."""
    return allowed | ~allowed.any(-1, keepdim=True)


def own(keys: Tensor) -> Tensor:
    """Let queries of padding attend only to themselves."""
    return (causal(keys) & keys[:, None, :, None]) | torch.eye(keys.shape[1], dtype=torch.bool)


MASKS: dict[str, Callable[[Tensor], Tensor | dict[str, Tensor]]] = {
    "int": lambda keys: keys.long(),
    "bool": lambda keys: keys,
    "float": lambda keys: keys.float(),
    "causal bool": causal,
    "causal int of three axes": lambda keys: causal(keys)[:, 0].long(),
    "causal added": lambda keys: added(causal(keys)),
    "causal added, -10,000": lambda keys: added(causal(keys), -1e4).bfloat16(),
    "causal with biases": lambda keys: added(causal(keys), float("-inf")) - 0.5,
    "causal of several heads": lambda keys: added(causal(keys)).expand(-1, 3, -1, -1),
    "keys bool": lambda keys: keys[:, None, None],
    "keys added": lambda keys: added(keys)[:, None, None],
    "both directions": lambda keys: added(keys[:, None, None].expand(-1, 1, keys.shape[1], -1)),
    "by kind of layer": lambda keys: {"full_attention": added(causal(keys)), "sliding_attention": added(causal(keys).triu())},
    "opened": lambda keys: added(opened(causal(keys))),
    "own": lambda keys: added(own(keys)),
}
FEWEST = {"opened": 1, "own": 2}
"""Tokens of a sequence at least, for masks that do not tell fewer from padding."""


def placed(rows: Sequence[Tensor], side: str, extra: int, pad: int, random: Any = None) -> tuple[Tensor, Tensor]:
    """Return sequences as one padded batch, and the mask of positions that are not padding."""
    width = max(map(len, rows)) + extra
    ids, is_token = torch.full((len(rows), width), pad), torch.zeros(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        first = {"left": width - len(row), "right": 0, "middle": (width - len(row)) // 2}.get(side)
        where = sorted(random.sample(range(width), len(row))) if first is None else list(range(first, first + len(row)))
        ids[number, where], is_token[number, where] = row, True
    return ids, is_token


def in_batches(rows: Sequence[Tensor], size: int) -> Iterator[Sequence[Tensor]]:
    yield from (rows[i : i + size] for i in range(0, len(rows), size))


def sequences(found: Sequence[Call]) -> list[list[list[Any]]]:
    """Return the arguments of each sequence's call: names, shapes, dtypes and values."""

    def row(name: str, x: Tensor, number: int, size: int) -> list[Any]:
        axis = int(name == "position_ids")
        own = x.narrow(axis, number, 1) if x.shape[axis] == size else x
        return [str(own.dtype), list(own.shape), own.tolist()]

    result = []
    for call in found:
        main = main_of(call)
        leaves = [(n, t) for n, v in call.kwargs.items() for t in (v.values() if isinstance(v, dict) else [v])]
        result += [[[n, *row(n, t, number, len(main))] for n, t in leaves] for number in range(len(main))]
    return result


def with_extras(ids: Tensor, is_token: Tensor, mask: str, extras: Sequence[str]) -> Batch:
    positions = (is_token.long().cumsum(-1) - 1).clamp(min=0)
    named = {
        "position_ids": positions.expand(3, -1, -1),
        "token_type_ids": positions % 2,
        "labels": torch.where(is_token, ids, -100),
        "cross_attention_mask": (positions % 3)[..., None, None],  # of images, by token: it says nothing of padding
    }
    batch: Batch = {"input_ids": ids, "attention_mask": MASKS[mask](is_token), **{name: named[name] for name in extras if name in named}}
    if "inputs_embeds" in extras:
        batch = {"inputs_embeds": batch.pop("input_ids")[..., None].float().expand(-1, -1, 2), **batch}
    return batch


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any),
    size=st.integers(1, 6),
    side=st.sampled_from(["left", "right", "middle", "anywhere"]),
    extra=st.integers(0, 3),
    pad=st.sampled_from([0, 1, 7, VOCABULARY - 1, VOCABULARY, -1]),
    mask=st.sampled_from(list(MASKS)),
    extras=st.lists(st.sampled_from(["position_ids", "token_type_ids", "labels", "cross_attention_mask", "inputs_embeds"]), unique=True),
    random=st.randoms(use_true_random=False),
)
def test_the_calls_of_a_padded_batch_are_those_of_its_sequences(
    lengths: list[int], size: int, side: str, extra: int, pad: int, mask: str, extras: list[str], random: Any
) -> None:
    lengths = [max(length, FEWEST.get(mask, 0)) for length in lengths]
    if mask == "opened" and side != "left":
        side = "right"  # elsewhere padding has keys before it, or none that it is not masked for
    rows = [torch.arange(100 * n + 3, 100 * n + 3 + length) for n, length in enumerate(lengths)]
    padded = [placed(part, side, extra, pad, random) for part in in_batches(rows, size) if any(map(len, part))]
    alone = [placed([row], "left", 0, pad) for row in rows if len(row)]
    found, expected = (calls([with_extras(*one, mask, extras) for one in data], model=MODEL) for data in (padded, alone))
    assert sequences(found) == sequences(expected)
    assert held_out_of(found) == held_out_of(expected)


def held_out_of(found: Sequence[Call]) -> list[list[int]]:
    """Return the held-out positions of each sequence."""
    rows = [row for call in found for row in (call.held_out if call.held_out is not None else torch.zeros(len(main_of(call)), 1))]
    return [row.nonzero().flatten().tolist() for row in rows]


def main_of(call: Call) -> Tensor:
    main = main_tensor(call.args, call.kwargs)
    assert main is not None
    return main


SOURCES = [torch.arange(3, 3 + n) for n in (4, 2, 5)]
TARGETS = [torch.arange(103, 103 + n) for n in (2, 5, 4)]  # the longest of both have one length


@pytest.mark.parametrize("kind", ["decoder_input_ids", "labels", "both", "decoder_inputs_embeds"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("extra", [(0, 0), (2, 0), (0, 2)])
def test_encoder_and_decoder_each_have_their_own_mask(kind: str, side: str, size: int, extra: tuple[int, int]) -> None:
    def batch(sources: Sequence[Tensor], targets: Sequence[Tensor], more: tuple[int, int]) -> Batch:
        ids, is_source = placed(sources, side, more[0], 0)
        targets_, is_target = placed(targets, side, more[1], 1)
        labels = torch.where(is_target, targets_, -100)
        by_kind: dict[str, Batch] = {
            "decoder_input_ids": {"decoder_input_ids": targets_, "decoder_attention_mask": is_target.long()},
            "decoder_inputs_embeds": {
                "decoder_inputs_embeds": targets_[..., None].float(),
                "decoder_attention_mask": is_target,
                "labels": labels,
            },
            "labels": {"labels": labels},
            "both": {"labels": labels, "decoder_attention_mask": is_target},
        }
        return {"input_ids": ids, "attention_mask": is_source.long(), **by_kind[kind]}

    parts = zip(in_batches(SOURCES, size), in_batches(TARGETS, size), strict=True)
    found = calls([batch(*part, extra) for part in parts], model=T5)
    expected = calls([batch([source], [target], (0, 0)) for source, target in zip(SOURCES, TARGETS, strict=True)], model=T5)
    assert sequences(found) == sequences(expected)


class Seq2Seq(nn.Module):
    """An encoder-decoder model, with only the attributes that making calls needs."""

    main_input_name = "input_ids"
    config = SimpleNamespace(is_encoder_decoder=True)
    generates = True

    def can_generate(self) -> bool:
        return self.generates

    def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> None:
        """Nobody calls it."""


T5 = Seq2Seq()


def test_a_decoder_without_a_mask_stays_whole_beside_an_encoder_with_padding() -> None:
    ids, is_token = placed(SOURCES[:1], "right", 2, 0)
    targets = torch.arange(6)[None]
    batch = {"input_ids": ids, "attention_mask": is_token, "decoder_input_ids": targets, "labels": torch.full_like(targets, -100)}
    (call,) = calls([batch], model=T5)
    assert call.kwargs["input_ids"].tolist() == [SOURCES[0].tolist()]
    assert torch.equal(call.kwargs["decoder_input_ids"], targets)
    assert torch.equal(call.kwargs["labels"], batch["labels"])


def test_labels_of_sequences_or_of_the_encoders_tokens_are_no_decoder() -> None:
    """A sequence classifier and a token classifier have such labels, and generate nothing."""
    ids, is_token = placed(SOURCES[:2], "right", 0, 0)
    found = calls([{"input_ids": ids, "attention_mask": is_token, "labels": torch.tensor([1, -100])}], model=T5)
    assert [call.kwargs["labels"].tolist() for call in found] == [[1], [-100]]
    classifier = Seq2Seq()
    classifier.generates = False
    labels = torch.tensor([[-100, 1, 2, -100], [-100, 3, -100, -100]])
    found = calls([{"input_ids": ids, "attention_mask": is_token, "labels": labels}], model=classifier)
    assert [call.kwargs["labels"].tolist() for call in found] == [[[-100, 1, 2, -100]], [[-100, 3]]]


def test_the_label_that_is_none_is_no_padding_of_a_decoder_only_model() -> None:
    ids = torch.arange(6)[None]
    (call,) = calls([{"input_ids": ids, "labels": torch.full_like(ids, -100)}], model=MODEL)
    assert torch.equal(call.kwargs["input_ids"], ids)


def test_without_a_mask_all_positions_count() -> None:
    ids = torch.zeros(2, 6, dtype=torch.long)
    for data in (ids, {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}):
        (call,) = calls([data], model=MODEL)
        assert main_tensor(call.args, call.kwargs) is ids


def test_a_batch_without_padding_stays_whole() -> None:
    ids = torch.arange(12).reshape(2, 6)
    for mask in (torch.ones(2, 6), torch.zeros(2, 1, 6, 6), torch.ones(1, 1, 6, 6, dtype=torch.bool), causal(torch.ones(2, 6).bool())):
        (call,) = calls([{"input_ids": ids, "attention_mask": mask}], model=MODEL)
        assert call.kwargs["input_ids"] is ids
        assert call.kwargs["attention_mask"] is mask


def test_the_documents_of_a_packed_sequence_are_no_padding() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2]])
    packed = causal(torch.ones(1, 7).bool()) & (documents[:, None, :, None] == documents[:, None, None])
    (call,) = calls([{"input_ids": documents, "attention_mask": packed}], model=MODEL)
    assert call.kwargs["input_ids"].shape == (1, 7)


@pytest.mark.parametrize("is_named", [True, False])
def test_samples_of_a_sound_are_cut_and_spectrograms_that_the_mask_does_not_fit_are_not(is_named: bool) -> None:
    sound, is_sound = torch.arange(12.0).reshape(2, 6), torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]])
    found = calls([{"attention_mask": is_sound, "input_values": sound} if is_named else (sound, is_sound)], model=Sounds())
    assert [main_of(call).tolist() for call in found] == [[[0.0, 1.0, 2.0]], [[6.0, 7.0, 8.0, 9.0, 10.0]]]
    spectrogram = torch.zeros(2, 4, 6)
    (call,) = calls([{"attention_mask": is_sound, "input_features": spectrogram}])
    assert call.kwargs["input_features"] is spectrogram
    assert call.kwargs["attention_mask"] is is_sound


class Sounds(nn.Module):
    """A speech model, with only the attributes that making calls needs."""

    main_input_name = "input_values"

    def forward(self, input_values: Tensor, attention_mask: Tensor | None = None) -> None:
        """Nobody calls it."""


IDS, IS_TOKEN = placed(SOURCES[:2], "left", 0, 0)


def test_images_go_with_the_sequence_of_their_row() -> None:
    images = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))  # four pixels beside four tokens
    found = calls([{"input_ids": IDS, "attention_mask": IS_TOKEN, "pixel_values": images, "sizes": [(4, 4), (4, 3)]}])
    assert torch.equal(torch.cat([call.kwargs["pixel_values"] for call in found]), images)
    assert [call.kwargs["sizes"] for call in found] == [[(4, 4)], [(4, 3)]]


@pytest.mark.parametrize("images", [torch.zeros(5, 8), [torch.zeros(3, 4, 4)] * 3])
def test_what_has_no_row_for_each_sequence_is_refused_and_one_sequence_has_all(images: Any) -> None:
    batch = {"input_ids": IDS, "attention_mask": IS_TOKEN, "pixel_values": images}
    with pytest.raises(CalibrationError, match="'pixel_values' of calibration batch 1 does not have one row for each of the 2 sequences"):
        calls([IDS, batch])
    (call,) = calls([{**batch, "input_ids": IDS[1:], "attention_mask": IS_TOKEN[1:]}])
    assert call.kwargs["pixel_values"] is images or call.kwargs["pixel_values"][0] is images[0]
    assert call.kwargs["input_ids"].tolist() == [SOURCES[1].tolist()]


def test_arguments_that_are_no_tensors_stay_as_they_are() -> None:
    found = calls([{"input_ids": IDS, "attention_mask": IS_TOKEN, "use_cache": False, "task": "asr", "scale": torch.tensor(2.0)}])
    assert [[call.kwargs[name] for name in ("use_cache", "task", "scale")] for call in found] == [[False, "asr", 2.0]] * 2


def test_ids_of_tokens_are_checked_and_those_of_padding_are_not() -> None:
    ids, is_token = placed([torch.arange(3, 6), torch.tensor([VOCABULARY])], "right", 0, -1)
    with pytest.raises(CalibrationError, match=f"batch 0 has the token id {VOCABULARY}"):
        calls([{"input_ids": ids, "attention_mask": is_token}], model=MODEL)
    assert len(calls([{"input_ids": ids[:1], "attention_mask": is_token[:1]}], model=MODEL)) == 1
