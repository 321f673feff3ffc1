"""The tiny Llama is small, complete, and good enough to show the cost of quantization."""

from __future__ import annotations

import math

import torch

import quark_tiny_model as tiny
from quark_workbench.evaluate import perplexity, token_windows

LIMIT = 4_000_000  # bytes, the held-out text apart


def test_the_directory_is_complete_and_small():
    sizes = {f.name: f.stat().st_size for f in tiny.tiny_model_dir().iterdir() if f.is_file()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(sizes)
    assert {"held_out.txt", "PROVENANCE.md"} <= set(sizes)
    assert sum(size for name, size in sizes.items() if name != "held_out.txt") <= LIMIT


def test_its_perplexity_is_below_a_third_of_a_unigram_models():
    windows = token_windows(tiny.tiny_tokenizer(), tiny.held_out_text(), 256, limit=16)
    # Kinder to the unigram model than the training script is: its frequencies are those of the very tokens it
    # is tried on.
    share = torch.bincount(windows[:, 1:].flatten()).double() / windows[:, 1:].numel()
    unigram = math.exp(-float(share[windows[:, 1:]].log().mean()))
    assert perplexity(tiny.tiny_model(), windows.split(4)) < unigram / 3


def test_groups_of_128_divide_every_linear_layer():
    layers = [m for m in tiny.tiny_model().modules() if isinstance(m, torch.nn.Linear)]
    assert layers
    assert all(layer.in_features % 128 == 0 for layer in layers)


def test_tokens_give_back_the_text():
    tokenizer, text = tiny.tiny_tokenizer(), tiny.held_out_text()[:5000] + " naïve 漢字 \t\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
