"""Kinds of layers, by names and shapes alone."""

from __future__ import annotations

import pytest
import torch

from quark_workbench.without_model.layer_kinds import LayerKinds, is_of_a_tower, predicts_ahead


def tensors(weight: tuple[int, ...], bias: int | None = None, **more: tuple[int, ...]) -> dict[str, torch.Tensor]:
    shapes = {"weight": weight, **more} | ({} if bias is None else {"bias": (bias,)})
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("name", "own", "kind"),
    [
        ("model.layers.0.mlp.up_proj", tensors((8, 4)), "linear"),
        ("model.layers.0.mlp.up_proj", tensors((8, 4), 8), "linear"),
        ("model.layers.0.mlp.shared_expert_gate", tensors((1, 4)), "linear"),
        ("gpt_neox.embed_out", tensors((8, 4)), "linear"),
        ("model.embed_projection", tensors((8, 4)), "linear"),
        ("model.embed_tokens", tensors((8, 4)), "embedding"),
        ("transformer.wte", tensors((8, 4)), "embedding"),
        ("tok_embeddings", tensors((8, 4)), "embedding"),
        ("shared", tensors((8, 4)), "embedding"),
        ("block.0.layer.0.SelfAttention.relative_attention_bias", tensors((8, 4)), "embedding"),
        ("model.layers.0.mlp.c_fc", tensors((4, 8), 8), "transposed"),
        ("model.layers.0.q_norm", tensors((8, 4)), "called a norm"),
        ("model.layers.0.ln_1", tensors((8, 4)), "called a norm"),
        ("model.layers.0.up", tensors((8, 4), lora_a=(2, 4)), "beside lora_a"),
        ("model.layers.0.up", tensors((8, 4), 3), "with a bias of another length"),
        ("model.layers.0.conv", tensors((8, 4, 2)), "no matrix called weight"),
    ],
)
def test_a_module_is_told_by_its_name_and_its_shapes(name: str, own: dict[str, torch.Tensor], kind: str) -> None:
    assert LayerKinds.of([own]).kind(name, own) == kind


def test_a_square_matrix_is_stored_as_the_others_are() -> None:
    usual, transposed, square = tensors((8, 4), 8), tensors((4, 8), 8), tensors((4, 4), 4)
    assert LayerKinds.of([usual, square]).kind("a", square) == "linear"
    assert LayerKinds.of([transposed, square]).kind("a", square) == "transposed"
    assert LayerKinds.of([usual, transposed, square]).kind("a", square) == "square, in a checkpoint with weights of both orders"


@pytest.mark.parametrize("name", ["vision_tower.encoder.layers", "model.visual.blocks", "audio_model.layers", "image_encoder.blocks"])
def test_towers_are_known_by_a_part_of_their_names(name: str) -> None:
    assert is_of_a_tower(name)


@pytest.mark.parametrize("name", ["mtp.layers.0", "model.mtp_block.0", "nextn.0", "model.layers_mtp"])
def test_layers_that_predict_ahead_are_known_by_a_part_of_their_names(name: str) -> None:
    assert predicts_ahead(name)


def test_layers_of_a_language_model_are_neither() -> None:
    names = ("model.layers.0.self_attn.q_proj", "transformer.h.0.attn", "model.drafter.up")
    assert not any(is_of_a_tower(name) or predicts_ahead(name) for name in names)
