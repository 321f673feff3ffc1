"""Stored tensors that the class of a model leaves out."""

import torch
from torch import nn

from quark.models.hf.placing import left_out_by


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
