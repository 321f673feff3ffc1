"""Families whose residual stream cannot be rotated.

The other rotations apply, R1 is left out with the reason, and checkpoints reload.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from quark.algorithms import BlockContext
from quark.config.architecture import Architecture
from quark.errors import UnsupportedError
from quark.models.layers.attention import BASIS
from quark.models.plan.quant_plan import make_plan
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.quantization.config.algo_configs import get_algo_config
from quark_algos.rotation.config import OnlineRotationConfig, QuaRotConfig, RotationConfig
from quark_algos.rotation.online import is_rotated
from quark_algos.rotation.transform import Rotate
from quark_templates.examples import tiny_model

from .models import IDS, blocks_of, distance, facts_of, logits, model_of

NORMED_OUTPUTS = ["exaone4", "gemma2", "gemma3_text", "glm4", "olmo2"]
REASON = "single channels"


def rotate(model: nn.Module, facts: Architecture, settings: RotationConfig) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Rotate a model as a run does.

    Return the metrics of its blocks and layers, and the notes of the plan.
    """
    plan = make_plan(model, LLMTemplate.get(facts.model_type).get_config("int4_wo_32"), facts)
    resolved = Rotate(settings).resolve_for_model(model, plan)
    run, metrics = Rotate(resolved.settings).start(model, plan), {}
    run.apply_global(model)
    for i, block in enumerate(blocks_of(model, facts)):
        context = BlockContext(f"{facts.decoder_blocks}.{i}", block, facts, {}, {})
        metrics |= {**run.apply(context), **run.finish(context)}
    return metrics, resolved.notes


@pytest.mark.parametrize("model_type", [*NORMED_OUTPUTS, "bloom"])
@pytest.mark.parametrize("r1", [False, True])
def test_values_and_inputs_are_rotated_and_the_model_computes_what_it_did(model_type: str, r1: bool) -> None:
    facts, model = facts_of(model_type), model_of(model_type)
    expected, value = logits(model), blocks_of(model, facts)[0].get_submodule(facts.attention_value or "").get_parameter("weight").clone()
    metrics, notes = rotate(model, facts, RotationConfig(scaling_layers={}, r1=r1, r2=True, r4=True))
    assert [metrics[f"{facts.decoder_blocks}.{i}"] for i in range(2)] == [{"r1": False, "r2": True}] * 2
    assert [metrics[f"{facts.decoder_blocks}.{i}.{facts.mlp_output}"] for i in range(2)] == [{"input_rotation": metrics_size(metrics)}] * 2
    assert notes[0].startswith("r1 is left out: the norm")
    assert REASON in notes[0]
    assert distance(blocks_of(model, facts)[0].get_submodule(facts.attention_value or "").get_parameter("weight"), value) > 0.1
    assert distance(logits(model), expected) < 1e-6  # some norms compute in float32 whatever the model's dtype is


def metrics_size(metrics: dict[str, Any]) -> int:
    (size,) = {m["input_rotation"] for m in metrics.values() if "input_rotation" in m}
    return int(size)


@pytest.mark.parametrize("model_type", NORMED_OUTPUTS)
def test_the_default_is_to_rotate_values(model_type: str) -> None:
    settings = get_algo_config("rotation", model_type)
    assert isinstance(settings, RotationConfig)
    assert (settings.r1, settings.r2, settings.r3, settings.r4, settings.scaling_layers) == (False, True, False, False, {})


@pytest.mark.parametrize("online", [None, OnlineRotationConfig(shared_parallel=False)])
def test_a_rotation_of_the_residual_stream_alone_is_refused(online: OnlineRotationConfig | None) -> None:
    facts, model = facts_of("gemma2"), model_of("gemma2")
    with pytest.raises(UnsupportedError, match=rf"{REASON}.*Set r1=False to use only r2, r3 and r4"):
        rotate(model, facts, RotationConfig(scaling_layers={}, online_config=online))


def test_readers_are_rotated_while_the_model_runs() -> None:
    facts, model = facts_of("gemma2"), model_of("gemma2")
    expected = logits(model)
    metrics, notes = rotate(model, facts, RotationConfig(scaling_layers={}, online_r1_rotation=True))
    assert {name.rpartition(".")[2] for name in metrics if "_proj" in name} == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert not any("left out" in note for note in notes)
    assert distance(logits(model), expected) < 1e-6


@pytest.mark.skipif("muse_glimmer" not in CONFIG_MAPPING, reason="this transformers has no muse_glimmer")
def test_a_gate_on_single_channels_forbids_the_rotation_of_values() -> None:
    facts, model = facts_of("muse_glimmer"), tiny_model("muse_glimmer").double()
    block = blocks_of(model, facts)[0]
    before = block.self_attn.v_proj.weight.clone()
    metrics, _ = rotate(model, facts, RotationConfig(scaling_layers={}, r1=False, r2=True, r4=True))
    assert metrics[f"{facts.decoder_blocks}.0"] == {
        "r1": False,
        "r2": False,
        "r2_reason": "a gate scales single channels of the values",
    }
    assert torch.equal(block.self_attn.v_proj.weight, before)
    assert get_algo_config("rotation", "muse_glimmer") is None


def outputs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3"])
def test_all_rotations_but_r1_are_applied_and_restored_from_the_checkpoint(model_type: str, tmp_path: Path) -> None:
    settings = QuaRotConfig(scaling_layers={}, preset="reference")
    config = LLMTemplate.get(model_type).get_config(
        "mxfp4", algorithm="rotation", algo_configs={"rotation": settings}, kv_cache_scheme="fp8"
    )
    model = ModelQuantizer(config).quantize_model(tiny_model(model_type), list(IDS.split(1)))
    (kept,) = model.quant_config.algo_config
    assert (kept.r1, kept.r2, kept.r3, kept.r4) == (False, True, True, True)
    assert any(note.startswith("r1 is left out: ") for note in model.quark_plan.notes)
    blocks = [metrics for name, metrics in model.quark_report.transformed.items() if name.endswith((".0", ".1"))]
    assert blocks == [{"r1": False, "r2": True}] * 2
    export_safetensors(model, tmp_path)
    assert "shared_input_rotation_64" in load_file(tmp_path / "model.safetensors")
    again = import_model_from_safetensors(None, tmp_path)
    assert torch.equal(outputs(again), outputs(model))
    decoder = facts_of(model_type).decoder_blocks
    assert [n for n, m in again.named_modules() if is_rotated(m)] == [f"{decoder}.{i}.mlp.down_proj" for i in range(2)]
    assert [n for n, m in again.named_modules() if hasattr(m, BASIS)] == [f"{decoder}.{i}.self_attn" for i in range(2)]
