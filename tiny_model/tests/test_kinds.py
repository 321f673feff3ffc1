"""The mixture and the model with LayerNorms are small, trained, and of the kind that they are for."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

import quark_tiny_model as tiny
from quark_workbench.evaluate import perplexity, token_windows

LIMIT = 1_500_000  # bytes
OTHERS = [kind for kind in tiny.KINDS if kind != "llama"]


@pytest.mark.parametrize("kind", OTHERS)
def test_the_directory_is_complete_and_small(kind: str):
    sizes = {f.name: f.stat().st_size for f in tiny.tiny_model_dir(kind).iterdir() if f.is_file()}
    files = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "PROVENANCE.md"}
    assert set(sizes) == files
    assert sum(sizes.values()) <= LIMIT
    assert (tiny.tiny_model_dir(kind) / "tokenizer.json").read_bytes() == (tiny.tiny_model_dir() / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("kind", OTHERS)
def test_its_perplexity_is_below_a_third_of_a_unigram_models(kind: str):
    windows = token_windows(tiny.tiny_tokenizer(), tiny.held_out_text(), 256, limit=16)
    share = torch.bincount(windows[:, 1:].flatten()).double() / windows[:, 1:].numel()
    unigram = math.exp(-float(share[windows[:, 1:]].log().mean()))
    assert perplexity(tiny.tiny_model(kind=kind), windows.split(4)) < unigram / 3


@pytest.mark.parametrize("kind", OTHERS)
def test_groups_of_64_divide_every_linear_layer(kind: str):
    layers = [m for m in tiny.tiny_model(kind=kind).modules() if isinstance(m, torch.nn.Linear)]
    assert len(layers) > 8
    assert all(layer.in_features % 64 == 0 for layer in layers)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_first_blocks_alone_are_a_model(kind: str):
    whole, one = tiny.tiny_model(kind=kind), tiny.tiny_model(kind=kind, blocks=1)
    blocks = [model.get_submodule(tiny.tiny_template(kind).architecture.decoder_blocks) for model in (whole, one)]
    assert (len(blocks[0]) > 1, len(blocks[1])) == (True, 1)
    tokens = tiny.calibration_batches(1, 16)[0]
    with torch.no_grad():
        assert one(tokens).logits.shape == whole(tokens).logits.shape
        assert not torch.equal(one(tokens).logits, whole(tokens).logits)


def test_a_router_chooses_two_of_eight_experts_and_uses_some_of_them_hardly_ever(load_script: Callable[[str], ModuleType]):
    script = load_script("tools/train_tiny_kinds.py")
    model = tiny.tiny_model(kind="mixture")
    tokens = torch.cat(tiny.calibration_batches(8, 256), dim=1)[0]
    counts = [torch.tensor(of_block) for _, of_block in script.tokens_of_experts(model, tokens, 256)]
    assert [int(of_block.sum()) for of_block in counts] == [script.TOP * len(tokens)] * 2
    assert all(len(of_block) == script.EXPERTS for of_block in counts)
    assert all(0 < int((of_block < of_block.double().mean() / 20).sum()) < 4 for of_block in counts)
    assert model.config.shared_expert_intermediate_size == 64


def test_norms_and_layers_have_biases_and_the_head_is_tied():
    model = tiny.tiny_model(kind="layernorm")
    named = dict(model.named_modules())
    norms = [m for m in named.values() if isinstance(m, torch.nn.LayerNorm)]
    layers = [m for name, m in named.items() if isinstance(m, torch.nn.Linear) and name != "lm_head"]
    assert all(m.bias is not None and bool(m.bias.any()) for m in (*norms, *layers))
    assert len(norms) == 5
    assert named["lm_head"].weight is model.get_input_embeddings().weight
