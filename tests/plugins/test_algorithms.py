"""A third party's algorithms, of a role unknown to core, are planned, run, exported and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from third_party.algorithms import ClippedNearestConfig, CountedNearestConfig, InputGainConfig
from third_party.input_gain import Gain
from torch import Tensor, nn

import quark_tiny_model as tiny
from quark.config.algorithm import AlgoConfig
from quark.config.model import QConfig
from quark.plugins import Catalog
from quark.runs import quantize_checkpoint
from quark.runs.run import plan_run
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors

DATA = tiny.calibration_batches(4, 64)


def config(*algorithms: AlgoConfig, scheme: str = "int4_wo_32", named: Any = None) -> QConfig:
    made = LLMTemplate.get("llama").get_config(scheme=scheme, algorithm=named)
    made.algo_config = [*(made.algo_config or []), *algorithms]
    return made


def quantized(*algorithms: AlgoConfig, **more: Any) -> Any:
    return ModelQuantizer(config(*algorithms, **more)).quantize_model(tiny.tiny_model(), DATA)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(DATA[0]).logits
    return found


def error(model: nn.Module) -> float:
    return float((logits(model) - logits(tiny.tiny_model())).square().mean())


def gains(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if any(isinstance(hook, Gain) for hook in m._forward_pre_hooks.values())]


@pytest.mark.parametrize("scheme", ["int4_wo_32", "int8", "mxfp4", "nvfp4"])
def test_the_rounding_runs_on_every_kind_of_scale_and_its_export_reloads(third_party: Catalog, scheme: str, tmp_path: Path) -> None:
    model = quantized(ClippedNearestConfig(), scheme=scheme)
    assert {row.algorithm for row in model.quark_plan.quantized} == {"clipped_nearest"}
    assert len(model.quark_report.layers) == len(model.quark_plan.quantized)
    export_safetensors(model, tmp_path / "out")
    assert torch.equal(logits(import_model_from_safetensors(None, str(tmp_path / "out"), device="cpu")), logits(model))


def test_narrower_ranges_make_the_outputs_better(third_party: Catalog) -> None:
    assert error(quantized(ClippedNearestConfig(), scheme="int4_wo_128")) < error(quantized(scheme="int4_wo_128"))


def test_a_rounding_that_needs_no_data_is_run_without_any(third_party: Catalog) -> None:
    model: Any = ModelQuantizer(config(CountedNearestConfig())).quantize_model(tiny.tiny_model())
    nearest = ModelQuantizer(config()).quantize_model(tiny.tiny_model())
    assert {metrics["layers"] for metrics in model.quark_report.layers.values()} == {7}, "all of a block are alike"
    assert set(model.quark_report.layers) == {row.name for row in model.quark_plan.quantized}
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), nearest.state_dict().values(), strict=True))


def test_it_is_run_where_static_activations_are_calibrated_too(third_party: Catalog) -> None:
    model = quantized(CountedNearestConfig(), scheme="int8")
    assert set(model.quark_report.layers) == {row.name for row in model.quark_plan.quantized}
    assert torch.equal(logits(model), logits(quantized(scheme="int8")))


@pytest.mark.parametrize("first", [False, True])
def test_the_transform_goes_before_equalization_however_they_are_named(third_party: Catalog, first: bool) -> None:
    made = config(InputGainConfig(), named="smoothquant")
    made.algo_config = sorted(made.algo_config or [], key=lambda a: a.name != "input_gain", reverse=not first)
    run = plan_run(tiny.tiny_model(), made)
    assert list(run.algorithms.transforms) == ["input_gain", "smoothquant"]


def test_the_transform_runs_with_the_model_and_with_the_one_that_is_read_back(third_party: Catalog, tmp_path: Path) -> None:
    model = quantized(InputGainConfig(), ClippedNearestConfig(), named="smoothquant", scheme="int8")
    downs = [f"model.layers.{i}.mlp.down_proj" for i in range(len(model.model.layers))]
    assert gains(model) == downs
    assert not torch.equal(logits(model), logits(quantized(ClippedNearestConfig(), named="smoothquant", scheme="int8")))
    assert not [n for n, f in model.quark_report.transformed.items() if "up_proj" in n and "scale_max" in f], "its input is taken"
    export_safetensors(model, tmp_path / "out")
    again = import_model_from_safetensors(None, str(tmp_path / "out"), device="cpu")
    assert gains(again) == downs
    assert torch.equal(logits(again), logits(model))


def test_from_disk_gives_the_checkpoint_that_the_model_in_memory_gives(third_party: Catalog, tmp_path: Path) -> None:
    made = config(InputGainConfig(), ClippedNearestConfig())
    export_safetensors(ModelQuantizer(made).quantize_model(tiny.tiny_model(torch.bfloat16), DATA), tmp_path / "memory")
    quantize_checkpoint(tiny.tiny_model_dir(), tmp_path / "disk", made, DATA)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "disk" / file).read_bytes() == (tmp_path / "memory" / file).read_bytes()
