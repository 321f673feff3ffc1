"""Stored tensors that the class of a model leaves out, or computes."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from quark.models.hf.missing_tensors import left_out_by, recomputed_by


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(2, 6)
        self.register_buffer("bias", torch.ones(2, 2), persistent=False)


class Model(nn.Module):
    _keys_to_ignore_on_load_unexpected = [r"attn.bias", r"layers\.61.*"]

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()


def test_patterns_leave_out_what_the_model_has_no_place_for() -> None:
    is_left_out = left_out_by(Model())
    assert is_left_out("attn.bias")  # a mask, which files of older versions hold
    assert is_left_out("layers.61.mlp.weight")
    assert not is_left_out("layers.60.mlp.weight")


def test_patterns_do_not_leave_out_tensors_of_the_models_own_layers() -> None:
    is_left_out = left_out_by(Model())
    assert not is_left_out("attn.c_attn.bias")
    assert not is_left_out("attn.c_attn.bias_scale")


def test_what_an_export_lists_is_left_out_unless_the_model_has_it() -> None:
    is_left_out = left_out_by(Model(), ["mtp.fc", "attn.c_attn", "bare"])
    assert is_left_out("mtp.fc.weight")
    assert is_left_out("bare")
    assert not is_left_out("attn.c_attn.weight")  # excluded, and a layer of the model
    assert not is_left_out("mtp.fc.inner.weight")


@pytest.mark.parametrize(
    ("family", "computed", "others"),
    [
        (
            "llama",
            ("model.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq"),
            ("model.layers.9.norm.weight", "inv_freq"),
        ),
        ("gpt2", ("transformer.h.0.attn.bias", "h.0.attn.bias"), ("transformer.h.9.attn.bias", "h.0.attn.c_attn.extra", "mtp.bias")),
    ],
)
def test_what_a_class_computes_is_told_from_what_it_does_not_take(family: str, computed: tuple[str, ...], others: tuple[str, ...]) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, num_hidden_layers=2))
    is_recomputed = recomputed_by(model)
    assert all(map(is_recomputed, computed))
    assert not any(map(is_recomputed, others))
