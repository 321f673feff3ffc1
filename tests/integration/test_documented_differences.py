"""The differences from AMD Quark of models in memory that the migration page lists."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import quark_tiny_model as tiny
from quark.models.layers import QuantizedLayer
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors

DATA = tiny.calibration_batches(2, 32)


@pytest.mark.parametrize("before_rope", [False, True])
def test_keys_are_rounded_behind_the_rotary_embedding_and_share_the_scale_of_values_on_either_side(
    before_rope: bool, tmp_path: Path
) -> None:
    options = {"kv_cache_post_rope": False} if before_rope else {}
    found = {}
    for separate in (False, True):
        config = LLMTemplate.get("llama").get_config("fp8", kv_cache_scheme="fp8", **options)
        config.separate_kv_scales = separate
        model = ModelQuantizer(config).quantize_model(tiny.tiny_model(), DATA)
        assert model.quant_config.kv_cache_post_rope is not before_rope
        export_safetensors(model, tmp_path / str(separate))
        stored = load_file(tmp_path / str(separate) / "model.safetensors")
        found[separate] = {n.removesuffix(".output_scale"): float(t) for n, t in stored.items() if n.endswith("_proj.output_scale")}
    assert len(found[True]) == 6
    for name, scale in found[False].items():
        block = name.rpartition(".")[0]
        assert scale == max(found[True][f"{block}.k_proj"], found[True][f"{block}.v_proj"])
    assert found[False] != found[True]


def test_a_model_that_is_read_back_holds_float_weights(tmp_path: Path) -> None:
    model = ModelQuantizer(LLMTemplate.get("llama").get_config("int4_wo_32")).quantize_model(tiny.tiny_model(torch.bfloat16))
    export_safetensors(model, tmp_path)
    read = import_model_from_safetensors(None, tmp_path, device="cpu")
    layers = [m for m in read.modules() if isinstance(m, QuantizedLayer)]
    assert {(type(m.weight), m.weight.dtype) for m in layers} == {(torch.nn.Parameter, torch.bfloat16)}
    assert sum(m.weight.nbytes for m in layers) == 4 * sum(m.weight.numel() // 2 for m in layers)
