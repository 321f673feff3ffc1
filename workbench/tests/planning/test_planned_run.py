"""A plan of a run on a checkpoint: what it writes to the byte, what it needs, and all that refuses it.

No weight is read.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from quark.checkpoint.export import export_options
from quark.config.templates import LLMTemplate
from quark.errors import CheckpointError
from quark.models.hf.loading import load_model
from quark.runs import quantize_checkpoint
from quark_tiny_model import calibration_batches, tiny_model_dir, tiny_template
from quark_workbench.planning.block_probe import BlockSeconds
from quark_workbench.planning.model_estimate import estimate_model
from quark_workbench.planning.planned_run import plan, planned_lines
from quark_workbench.planning.workload import Calibration

CONFIGS: dict[str, dict[str, Any]] = {
    "codes": {"scheme": "int4_wo_64"},
    "two levels": {"scheme": "nvfp4"},
    "block scales": {"scheme": "mxfp4"},
    "static scales and a cache": {"scheme": "fp8", "kv_cache_scheme": "fp8"},
    "some layers in another scheme": {"scheme": "int4_wo_64", "layer_config": {"*.down_proj": "uint4_wo_32"}},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("arguments", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("exporter_options", [{}, {"max_shard_bytes": 300_000}, {"weight_format": "fake_quantized"}], ids=str)
def test_files_have_the_size_that_the_plan_says(arguments: dict[str, Any], exporter_options: dict[str, Any], tmp_path: Path) -> None:
    config, options = tiny_template().get_config(**arguments), export_options("safetensors", exporter_options)
    planned = plan(tiny_model_dir(), config, options=options, probing=False)
    quantize_checkpoint(tiny_model_dir(), tmp_path / "out", config, calibration_batches(2, 32), options=options)
    written = {f.name: f.stat().st_size for f in (tmp_path / "out").iterdir() if ".safetensors" in f.name}
    assert planned.estimate is not None
    assert planned.estimate.output is not None
    assert planned.estimate.output.files == written
    assert (len(written) > 1) == ("max_shard_bytes" in exporter_options)


def test_bits_of_a_weight_include_its_scales() -> None:
    planned = plan(tiny_model_dir(), "mxfp4", probing=False)
    assert planned.estimate is not None
    assert planned.estimate.output is not None
    assert planned.estimate.output.bits_per_quantized_weight == 4 + 8 / 32


def test_a_config_alone_is_enough(tmp_path: Path) -> None:
    shutil.copy(tiny_model_dir() / "config.json", tmp_path)
    alone, whole = (plan(path, "int4_wo_64", probing=False) for path in (tmp_path, tiny_model_dir()))
    assert alone.refusals == ()
    assert alone.estimate is not None
    assert whole.estimate is not None
    assert alone.plan == whole.plan
    assert alone.estimate.output == whole.estimate.output


def test_no_weight_is_read(tmp_path: Path) -> None:
    """Data that cannot be read: a file whose body is a hole beyond the disk would be, byte by byte, zeros."""
    directory = Path(shutil.copytree(tiny_model_dir(), tmp_path / "in"))
    shard = directory / "model.safetensors"
    data = shard.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    shard.write_bytes(data[:end] + b"\xff" * (len(data) - end))  # NaN everywhere, which a run refuses
    assert plan(directory, "int4_wo_64", probing=False).refusals == ()


def test_all_that_refuses_a_run_is_told_at_once(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_model_dir(), tmp_path / "in"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"intermediate_size": 320}))
    shard = directory / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    planned = plan(directory, "int4_wo_128", device="toaster", exporter="smoke", probing=False)
    assert planned.plan is None
    assert [r.kind for r in planned.refusals] == ["UnknownNameError", "ConfigError", "CheckpointError", "ConfigError"]
    words = ("smoke", "toaster", "is truncated", "model.layers.{0-2}.mlp.down_proj")
    assert all(word in refusal.message for word, refusal in zip(words, planned.refusals, strict=True))


def test_weights_that_do_not_fit_the_config_are_told_with_the_plan(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_model_dir(), tmp_path / "in"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    planned = plan(directory, "int4_wo_64", probing=False)
    assert planned.plan is not None
    assert [r.message for r in planned.refusals if "lacks 9 tensor(s)" in r.message]


def test_a_directory_that_is_none_is_refused_and_not_raised(tmp_path: Path) -> None:
    planned = plan(tmp_path / "nowhere", "int4_wo_64", probing=False)
    assert [r.kind for r in planned.refusals] == [CheckpointError.__name__]


def test_a_missing_tokenizer_refuses_only_a_run_that_needs_one(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_model_dir() / name, tmp_path)
    assert plan(tmp_path, "int4_wo_64", probing=False).refusals == ()
    gptq = tiny_template().get_config(scheme="int4_wo_64", algorithm="gptq")
    refusals = plan(tmp_path, gptq, probing=False).refusals
    assert ["has no tokenizer" in r.message for r in refusals] == [True]


def test_a_budget_for_activations_decides_the_memory_mode() -> None:
    config = tiny_template().get_config(scheme="int4_wo_64", algorithm="gptq")
    config.activation_memory = 1000
    planned, free = plan(tiny_model_dir(), config, probing=False), plan(tiny_model_dir(), "int4_wo_64", probing=False)
    assert planned.plan is not None
    assert planned.estimate is not None
    assert free.estimate is not None
    assert any("each block runs twice" in note for note in planned.plan.notes)
    assert (planned.estimate.work.forwards, free.estimate.work.forwards) == (2, 0)


def test_a_measured_block_gives_seconds_by_phase_and_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    config = tiny_template().get_config(scheme="int4_wo_64", algorithm=["awq", "gptq"])
    found = plan(tiny_model_dir(), config, calibration=Calibration(2, 32)).estimate
    assert found is not None
    assert found.block is not None
    assert {"reading", "transforms", "forwards", "statistics", "rounding", "writing"} <= set(found.seconds)
    assert all(seconds > 0 for seconds in found.seconds.values())
    assert torch.equal(before, torch.get_rng_state())


def test_the_seconds_of_a_block_grow_with_the_tokens() -> None:
    block = BlockSeconds({"solve": 0.5, "forward": 0.25}, {"solve": 0.0, "forward": 2.0**-10}, 100)
    assert block.of(1024) == {"solve": 0.5, "forward": 1.25}


MODELS = {
    "of 7B": {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32},
    "mixture": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("values", MODELS.values(), ids=MODELS)
def test_the_time_of_a_large_block_is_scaled_from_a_narrower_one(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values | {"num_hidden_layers": 2, "vocab_size": 512, "dtype": "bfloat16"}))
    monkeypatch.setattr("quark_workbench.planning.block_probe._BUDGET", 0.0)
    config = LLMTemplate.get(values["model_type"]).get_config(scheme="int4_wo_128", algorithm="gptq")
    planned = plan(tmp_path, config, calibration=Calibration(2, 128))
    assert planned.estimate is not None
    assert planned.estimate.block is not None
    assert planned.estimate.block.size > 128 << 20
    assert planned.estimate.block.measured_share < 0.03
    assert {"forwards", "statistics", "rounding", "writing"} <= set(planned.estimate.seconds)
    assert "scaled from a run on a narrower block, of " in " ".join(planned_lines(planned))


def test_plan_says_that_the_time_is_not_known_of_a_large_block_that_cannot_be_made_narrower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quark_workbench.planning.block_probe._LARGEST", 0)
    planned = plan(tiny_model_dir(), tiny_template().get_config(scheme="int4_wo_64", algorithm="gptq"), calibration=Calibration(2, 32))
    assert planned.estimate is not None
    assert planned.estimate.block is None
    assert planned.estimate.seconds == {}
    assert "time: not known" in " ".join(planned_lines(planned))
    assert planned.estimate.memory
    unprobed = plan(tiny_model_dir(), "int4_wo_64", probing=False)
    assert "time:" not in " ".join(planned_lines(unprobed))


def test_why_a_block_cannot_be_measured_stands_in_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: object) -> None:
        raise AttributeError("its rotary embedding is elsewhere")

    monkeypatch.setattr("quark_workbench.planning.block_probe._seconds", fails)
    with caplog.at_level("DEBUG", "quark"):
        planned = plan(tiny_model_dir(), "int4_wo_64")
    assert planned.estimate is not None
    assert planned.estimate.block is None
    assert "AttributeError: its rotary embedding is elsewhere" in caplog.text


def test_a_model_in_memory_has_the_estimate_of_its_checkpoint() -> None:
    config, size = tiny_template().get_config(scheme="mxfp4", algorithm="gptq"), Calibration(4, 64)
    model = load_model(tiny_model_dir(), "auto")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    own = estimate_model(model, config, size)
    planned = plan(tiny_model_dir(), config, calibration=size, probing=False).estimate
    assert planned is not None
    assert own.output == planned.output
    assert own.work.flops == planned.work.flops
    assert own.seconds["rounding"] > 0
    assert own.memory["rounded weights"] == sum(t.nbytes for n, t in before.items() if "proj" in n)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_everything_is_json() -> None:
    config = tiny_template().get_config(scheme="int4_wo_64", algorithm="gptq")
    found = json.loads(json.dumps(plan(tiny_model_dir(), config, probing=False).to_dict()))
    assert {"rows", "estimate", "refusals", "needs_data"} <= found.keys()
    assert found["estimate"]["memory"]["peak"] == sum(v for k, v in found["estimate"]["memory"].items() if k != "peak")
