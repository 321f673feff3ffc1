"""Families that see, quantized on text and on an image, exported and read back.

The same logits to the bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from quark.errors import CalibrationError
from quark.models.hf.loading import load_model
from quark.models.hf.skeleton import empty_model, meta_model
from quark.models.layers.experts import SeparateExperts
from quark.runs.from_disk import quantize_checkpoint
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_templates.plugin import MULTIMODAL, TEXT_PARTS

from .seeing_models import IDS, image_batch, logits, model_of


@pytest.mark.one_in(6)
@pytest.mark.parametrize("model_type", sorted(MULTIMODAL | TEXT_PARTS))
@pytest.mark.parametrize("scheme", ["int4_wo_32", "fp8", "mxfp4"])
def test_a_model_quantized_on_text_alone_is_read_back_to_the_bit(model_type: str, scheme: str, tmp_path: Path) -> None:
    model, template = model_of(model_type), LLMTemplate.get(model_type)
    # Text passes neither what sees nor the blocks of cross-attention: static scales there are refused.
    blind = ["*vision_model*", "*multi_modal_projector", "*.layers.1.*"] if (model_type, scheme) == ("mllama", "fp8") else []
    cache = "fp8" if scheme == "fp8" and not blind else None
    config = template.get_config(scheme, kv_cache_scheme=cache, exclude_layers=[*template.exclude_layers_name, *blind])
    before = logits(model)
    model = ModelQuantizer(config).quantize_model(model, list(IDS.split(1)))
    assert not torch.equal(logits(model), before), "nothing was quantized"
    reasons = {row.name: row.reason for row in model.quark_plan.rows}
    towers = ("model.visual.", "model.vision_tower.")
    assert all(reason.startswith("excluded: ") for name, reason in reasons.items() if name.startswith(towers))
    assert len([m for m in model.modules() if isinstance(m, SeparateExperts)]) == (2 if "moe" in model_type else 0)
    export_safetensors(model, tmp_path / "out")
    read = import_model_from_safetensors(None, tmp_path / "out")
    assert type(read) is type(model)
    assert torch.equal(logits(read), logits(model))
    by_transformers = type(read).from_pretrained(tmp_path / "out")
    assert torch.equal(logits(by_transformers), logits(model))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model_type", sorted(MULTIMODAL | TEXT_PARTS, key=lambda name: "moe" not in name))
def test_a_checkpoint_is_quantized_from_disk_as_in_memory(model_type: str, tmp_path: Path) -> None:
    """It has the names and axes of published checkpoints: conversions of some ask for the model's tensors."""
    model_of(model_type).save_pretrained(tmp_path / "float")
    config = LLMTemplate.get(model_type).get_config("int4_wo_32")
    export_safetensors(ModelQuantizer(config).quantize_model(load_model(tmp_path / "float")), tmp_path / "memory")
    quantize_checkpoint(tmp_path / "float", tmp_path / "disk", config)
    in_memory, from_disk = ((tmp_path / place / "model.safetensors").read_bytes() for place in ("memory", "disk"))
    assert in_memory == from_disk


@pytest.mark.parametrize("seeing_type", ["gemma3", "mllama"])
def test_a_model_quantized_on_an_image_is_read_back_to_the_bit(seeing_type: str, tmp_path: Path) -> None:
    batch = image_batch(seeing_type)
    model = ModelQuantizer(LLMTemplate.get(seeing_type).get_config("fp8", kv_cache_scheme="fp8")).quantize_model(
        model_of(seeing_type), [batch]
    )
    export_safetensors(model, tmp_path / "out")
    model.requires_grad_(False)  # as the model that is read: torch multiplies by a matrix that wants gradients in another way
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out"), **batch), logits(model, **batch))


def test_static_scales_that_text_does_not_reach_are_refused_with_a_fix() -> None:
    with pytest.raises(CalibrationError, match=r"cross_attn\.q_proj.*or exclude the layer"):
        ModelQuantizer(LLMTemplate.get("mllama").get_config("fp8")).quantize_model(model_of("mllama"), [IDS])


def test_a_quantized_head_is_no_longer_tied_after_reading_back(tmp_path: Path) -> None:
    template = LLMTemplate.get("gemma3")
    config = template.get_config("int4_wo_32", exclude_layers=["*vision_tower*", "*multi_modal_projector*"])
    model = ModelQuantizer(config).quantize_model(model_of("gemma3"))
    export_safetensors(model, tmp_path / "out")
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out")), logits(model))
    assert torch.equal(logits(AutoModelForImageTextToText.from_pretrained(tmp_path / "out")), logits(model))


@pytest.mark.parametrize("saved_type", ["gemma3", "mllama", "qwen3_5"])
def test_a_float_checkpoint_is_loaded_as_the_class_that_it_names(saved_type: str, tmp_path: Path) -> None:
    model = model_of(saved_type)
    model.save_pretrained(tmp_path)
    assert type(meta_model(tmp_path)) is type(empty_model(tmp_path, None)) is type(model)
    assert torch.equal(logits(load_model(tmp_path)), logits(model))


def test_the_decoder_of_a_vision_language_model_is_a_family_of_its_own(tmp_path: Path) -> None:
    """Its checkpoint names another class, which transformers makes of the same config's text part."""
    model = model_of("qwen3_5_text")
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert type(loaded) is type(model)
    assert loaded.config.model_type == "qwen3_5_text"


def test_processor_files_are_exported(tmp_path: Path) -> None:
    names = ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"]
    model_of("qwen2_5_vl").save_pretrained(tmp_path / "float")
    for name in names:
        (tmp_path / "float" / name).write_text("{}", encoding="utf-8")
    model = ModelQuantizer(LLMTemplate.get("qwen2_5_vl").get_config("int4_wo_32")).quantize_model(load_model(tmp_path / "float"))
    export_safetensors(model, tmp_path / "out")
    assert all((tmp_path / "out" / name).is_file() for name in names)
