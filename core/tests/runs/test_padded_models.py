"""Padding is no token in any kind of model: decoders, encoders, encoder-decoders and speech models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from quark.config.model import QConfig
from quark.runs import ModelQuantizer
from quark.torch import LLMTemplate

LENGTHS = {"": (12, 7, 9, 12), "decoder_": (5, 12, 8, 3)}
"""Of encoders and decoders; the longest have one length, so that the mask of one fits the other."""
SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
BART: dict[str, Any] = {
    "vocab_size": 256,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 64,
}
T5: dict[str, Any] = {
    "vocab_size": 256,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
SOUNDS: dict[str, Any] = {"conv_dim": (32, 32), "conv_kernel": (4, 3), "conv_stride": (3, 2), "num_feat_extract_layers": 2}
SOUNDS |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "feat_extract_norm": "layer"}
CONFIGS: dict[str, tuple[str, Any]] = {
    "llama": ("LlamaForCausalLM", hf.LlamaConfig(**SMALL, num_key_value_heads=2)),
    "gpt2": ("GPT2LMHeadModel", hf.GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=64)),
    "opt": ("OPTForCausalLM", hf.OPTConfig(vocab_size=256, hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4)),
    "bert": ("BertForMaskedLM", hf.BertConfig(**SMALL)),
    "xlm-roberta": ("XLMRobertaForSequenceClassification", hf.XLMRobertaConfig(**SMALL, max_position_embeddings=64)),
    "deberta": ("DebertaV2ForTokenClassification", hf.DebertaV2Config(**SMALL)),
    "t5": ("T5ForConditionalGeneration", hf.T5Config(**T5)),
    "bart": ("BartForConditionalGeneration", hf.BartConfig(**BART)),
    "wav2vec2": ("Wav2Vec2Model", hf.Wav2Vec2Config(**SMALL, **SOUNDS)),
}
Data = list[dict[str, Any]]


def sequences(prefix: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(prefix))
    return [torch.randint(6, 250, (length,), generator=generator) for length in LENGTHS[prefix]]


def placed(rows: Sequence[Tensor], side: str, extra: int, pad: int) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows)) + extra
    values, mask = rows[0].new_full((len(rows), width), pad), torch.zeros(len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        first = width - len(row) if side == "left" else 0
        values[number, first : first + len(row)], mask[number, first : first + len(row)] = row, 1
    return values, mask


def in_batches(prefix: str, form: tuple[str, int, int, int]) -> Iterator[tuple[Tensor, Tensor]]:
    side, extra, size, pad = form
    rows = sequences(prefix)
    yield from (placed(rows[i : i + size], side, extra, pad) for i in range(0, len(rows), size))


def of_text(form: tuple[str, int, int, int]) -> Data:
    return [{"input_ids": ids, "attention_mask": mask} for ids, mask in in_batches("", form)]


def with_decoder(form: tuple[str, int, int, int]) -> Data:
    targets = in_batches("decoder_", form)
    return [
        {**source, "decoder_input_ids": ids, "decoder_attention_mask": mask}
        for source, (ids, mask) in zip(of_text(form), targets, strict=True)
    ]


def with_labels(form: tuple[str, int, int, int]) -> Data:
    targets = in_batches("decoder_", form)
    return [{**source, "labels": torch.where(mask == 1, ids, -100)} for source, (ids, mask) in zip(of_text(form), targets, strict=True)]


def of_sounds(form: tuple[str, int, int, int]) -> Data:
    """Return waves of 40 samples for each number of a sequence."""
    batches = []
    for values, mask in in_batches("", form):
        waves = torch.sin(values[..., None] * torch.arange(40)).flatten(1)
        is_sound = mask.repeat_interleave(40, 1)
        batches.append({"input_values": torch.where(is_sound == 1, waves, float(form[3])), "attention_mask": is_sound})
    return batches


def with_causal_masks(form: tuple[str, int, int, int]) -> Data:
    """Masks as transformers makes them, ``[batch, 1, queries, keys]``, added to the logits."""
    data = of_text(form)
    for batch in data:
        keys = batch["attention_mask"] == 1
        allowed = keys[:, None, None] & torch.ones(keys.shape[1], keys.shape[1], dtype=torch.bool).tril()
        allowed = allowed | ~allowed.any(-1, keepdim=True)
        batch["attention_mask"] = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    return data


ALONE = ("right", 0, 1, 0)
FORMS = [("right", 3, 1, 0), ("left", 2, 1, 1), ("right", 0, 2, 99), ("left", 1, 4, 0)]
CASES: list[tuple[str, Callable[..., Data]]] = [(name, of_text) for name in CONFIGS if name not in ("t5", "bart", "wav2vec2")]
CASES += [(name, data) for name in ("t5", "bart") for data in (with_decoder, with_labels)]
CASES += [("bart", of_text), ("wav2vec2", of_sounds), ("llama", with_causal_masks)]


def model_of(name: str) -> nn.Module:
    kind, config = CONFIGS[name]
    torch.manual_seed(0)
    model: nn.Module = getattr(hf, kind)._from_config(copy.deepcopy(config)).eval()
    if name == "wav2vec2":
        model.get_input_embeddings = lambda: None  # type: ignore[assignment]  # transformers has none for it, and raises
        return model
    weight = model.get_input_embeddings().weight.data  # type: ignore[operator]
    for pad in {form[3] for form in FORMS}:
        weight[pad] = 30 * torch.randn(weight.shape[1])  # seen wherever padding counts
    return model


def scales(model: nn.Module, data: Data) -> dict[str, Tensor]:
    config = QConfig(global_quant_config=LLMTemplate.get("llama").get_config("int8").global_quant_config, exclude=["*lm_head"])
    quantized = ModelQuantizer(config).quantize_model(copy.deepcopy(model), data)
    return {name: x for name, x in quantized.state_dict().items() if "scale" in name}


@pytest.mark.parametrize(("name", "data"), CASES, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_every_kind_of_model_has_the_scales_of_the_sequences(name: str, data: Callable[..., Data]) -> None:
    model = model_of(name)
    expected = scales(model, data(ALONE))
    assert any("input" in key for key in expected)
    for form in FORMS:
        found = scales(model, data(form))
        assert [key for key in expected if not torch.equal(found[key], expected[key])] == [], form


def test_sequences_that_are_packed_by_their_positions_have_the_scales_of_the_sequences() -> None:
    """Only the order of sums differs: float32 products of 128 numbers, layer by layer, are exact to 1e-4."""
    model, rows = model_of("llama"), sequences("")
    packed = {"input_ids": torch.cat(rows)[None], "position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None]}
    found, expected = scales(model, [packed]), scales(model, [{"input_ids": row[None]} for row in rows])
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-4, atol=0)


def test_a_mask_of_ones_and_none_give_the_same() -> None:
    model, rows = model_of("llama"), sequences("")
    found, expected = scales(model, of_text(ALONE)), scales(model, [{"input_ids": row[None]} for row in rows])
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
