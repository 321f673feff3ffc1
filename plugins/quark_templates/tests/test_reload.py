"""Every family, quantized with its template, exported and read back: the same logits to the bit."""

from __future__ import annotations

from copy import deepcopy
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from quark.config.architecture import Architecture
from quark.errors import ConfigError
from quark.models.hf.internals import can_set_attention
from quark.models.layers import counts_as
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors

IDS = torch.arange(40).reshape(2, 20)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("scheme", "algorithm"), [("int4_wo_32", None), ("fp8", None), ("mxfp4", None), ("int4_wo_32", ["awq", "gptq"])], ids=str
)
def test_weights_and_an_eight_bit_cache_reload_to_the_same_logits(
    family: tuple[nn.Module, Architecture], scheme: str, algorithm: list[str] | None, tmp_path: Path
) -> None:
    tiny, facts = family
    template = LLMTemplate.get(facts.model_type)
    names = [name for name in algorithm or [] if template.algo_config[name] is not None]
    config = template.get_config(scheme=scheme, algorithm=names or None, kv_cache_scheme="fp8" if facts.kv_layers_name else None)
    model = ModelQuantizer(config).quantize_model(deepcopy(tiny), [IDS[:1]])
    export_safetensors(model, tmp_path / "out")
    expected = logits(model)
    assert not torch.equal(expected, logits(tiny)), "nothing was quantized"
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out")), expected)
    projections = {name for name, m in tiny.named_modules() if counts_as(m) is nn.Linear and name != facts.head}
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as tensors:
        names = set(tensors.keys())
    assert {name.removesuffix(".weight_scale") for name in names if name.endswith(".weight_scale")} == projections
    cached = {name for name in projections if any(fnmatchcase(name, p) for p in facts.kv_layers_name or ())}
    fused = {f"{row.name}.{state}_scale" for row in model.quark_plan.attentions if row.fused for state in "kv"}
    stored = {name for name in names if name.endswith((".output_scale", ".k_scale", ".v_scale"))}
    assert stored == (fused or {f"{name}.output_scale" for name in cached})


@pytest.mark.one_in(8)
@pytest.mark.parametrize("cache", ["fp8_per_head", "int8", "nvfp4"])
def test_scales_of_heads_reload_to_the_same_logits(family: tuple[nn.Module, Architecture], cache: str, tmp_path: Path) -> None:
    tiny, facts = family
    if not facts.kv_layers_name:
        pytest.skip("nothing is known of its cache")
    run = ModelQuantizer(LLMTemplate.get(facts.model_type).get_config("int4_wo_32", kv_cache_scheme=cache))
    sizes = {size for m in tiny.modules() for name in ("head_dim", "head_size") if isinstance(size := getattr(m, name, None), int)}
    if not can_set_attention(tiny) or not sizes or (cache == "nvfp4" and any(size % 16 for size in sizes)):
        with pytest.raises(ConfigError, match=r"attention interface|do not fit heads of|does not show its heads"):
            run.quantize_model(deepcopy(tiny), [IDS[:1]])
        return
    model = run.quantize_model(deepcopy(tiny), [IDS[:1]])
    heads = {row.name: row.heads for row in model.quark_plan.attentions}
    assert all(heads.values()), "every module shows its heads"
    if cache == "fp8_per_head":
        found = {name: tuple(model.get_submodule(name).key_quantizer.scale.shape) for name in heads}
        assert found == {name: (count,) for name, (count, _) in heads.items()}
    export_safetensors(model, tmp_path / "out")
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out")), logits(model))
