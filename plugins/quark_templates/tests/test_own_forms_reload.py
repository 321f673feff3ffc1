"""Mixtures with forms of their own, quantized from memory and from disk, exported and read back.

The same logits to the bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from quark.models.hf.loading import load_model
from quark.models.layers import QuantizedLayer
from quark.models.layers.experts import SeparateExperts
from quark.runs.from_disk import quantize_checkpoint
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_templates.examples import EXPERTS
from quark_templates.plugin import OWN_FORMS

from .caches import eight_bit_cache
from .lacking_families import why_lacking
from .own_forms import IDS, logits, model_of


@pytest.mark.one_in(6)
@pytest.mark.parametrize("model_type", sorted(OWN_FORMS))
@pytest.mark.parametrize("scheme", ["int4_wo_32", "fp8", "mxfp4"])
def test_experts_are_quantized_one_by_one_and_read_back_to_the_bit(model_type: str, scheme: str, tmp_path: Path) -> None:
    model = model_of(model_type)
    before = logits(model)
    cache = eight_bit_cache(model_type) if scheme == "fp8" else {}
    config = LLMTemplate.get(model_type).get_config(scheme, **cache)
    ModelQuantizer(config).quantize_model(model, list(IDS.split(1)))
    mixtures = [m for m in model.modules() if isinstance(m, SeparateExperts)]
    assert {len(list(m.children())) for m in mixtures} == {EXPERTS}
    assert all(isinstance(layer, QuantizedLayer) for m in mixtures for expert in m.children() for layer in expert.children())
    expected = logits(model)
    assert expected.isfinite().all()
    assert not torch.equal(expected, before), "nothing was quantized"
    export_safetensors(model, tmp_path / "out")
    read = import_model_from_safetensors(None, tmp_path / "out")
    assert type(read) is type(model)
    assert torch.equal(logits(read), expected)
    assert torch.equal(logits(type(read).from_pretrained(tmp_path / "out")), expected)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model_type", sorted(OWN_FORMS))
def test_a_checkpoint_is_quantized_from_disk_as_in_memory(model_type: str, tmp_path: Path) -> None:
    """It has the names of published checkpoints."""
    model_of(model_type).save_pretrained(tmp_path / "float")
    config = LLMTemplate.get(model_type).get_config("fp8", **eight_bit_cache(model_type))
    export_safetensors(ModelQuantizer(config).quantize_model(load_model(tmp_path / "float"), list(IDS.split(1))), tmp_path / "memory")
    quantize_checkpoint(tmp_path / "float", tmp_path / "disk", config, list(IDS.split(1)))
    in_memory, from_disk = ((tmp_path / place / "model.safetensors").read_bytes() for place in ("memory", "disk"))
    assert in_memory == from_disk


@pytest.mark.skipif(why_lacking("llama4") is not None, reason=str(why_lacking("llama4")))
def test_experts_of_llama_4_have_the_names_that_vllm_reads(tmp_path: Path) -> None:
    model = ModelQuantizer(LLMTemplate.get("llama4").get_config("int4_wo_32")).quantize_model(model_of("llama4"))
    export_safetensors(model, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        names = {name for name in file.keys() if ".experts." in name}  # noqa: SIM118
    prefix = "language_model.model.layers.1.feed_forward.experts"
    kinds = {name.rpartition(".")[2] for name in names}
    layers = ("gate_proj", "up_proj", "down_proj")
    assert names == {f"{prefix}.{i}.{layer}.{kind}" for i in range(EXPERTS) for layer in layers for kind in kinds}


@pytest.mark.parametrize("model_type", ["dbrx", "llama4_text"])
def test_static_scales_are_of_the_tokens_routed_to_an_expert_or_of_all_where_that_is_asked_for(model_type: str) -> None:
    first = "w1" if model_type == "dbrx" else "gate_proj"
    config = LLMTemplate.get(model_type).get_config("fp8")
    scales = {}
    for everything in (False, True):
        config.calibrate_all_experts = everything
        model = ModelQuantizer(config).quantize_model(model_of(model_type), list(IDS.split(1)))
        mixture = next(m for m in model.modules() if isinstance(m, SeparateExperts))
        scales[everything] = [float(getattr(expert, first).input_quantizer.scale) for expert in mixture.children()]
    assert len(set(scales[False])) > 1
    assert all(own <= shown for own, shown in zip(scales[False], scales[True], strict=True))
    assert scales[False] != scales[True]
