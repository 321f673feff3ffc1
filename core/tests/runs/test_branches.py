"""Branches are the same in memory and from disk; each reader restores them, or an error refuses them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from quark.algorithms import AbsMax, Branching, BranchSite, BranchTask
from quark.checkpoint.export import export_with
from quark.config.algorithm import AlgoConfig
from quark.config.model import QConfig
from quark.errors import ConfigError, MissingPluginError, UnsupportedError
from quark.models.hf.loading import load_model
from quark.models.layers import Branch
from quark.plugins import AlgorithmRecord, ExporterRecord, algorithms, exporters
from quark.runs import ModelQuantizer, quantize_checkpoint
from quark.runs.run import plan_run
from quark.torch import LLMTemplate, import_model_from_safetensors
from quark_devkit.small_models import batches, logits, saved, small_model
from quark_devkit.whole_runs import contents, first_difference


@attrs.define(kw_only=True)
class OutliersConfig(AlgoConfig):
    """Input channels that stay float, as in LLM.int8."""

    name: str = "outliers"
    count: int = 4

    def runs_with_model(self) -> bool:
        return True


@attrs.define(kw_only=True)
class OthersConfig(OutliersConfig):
    """`OutliersConfig` under another name."""

    name: str = "others"


class Outliers(Branch):
    def __init__(self, count: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
        super().__init__()
        self.columns = nn.Parameter(torch.empty(shape[0], count, dtype=dtype), requires_grad=False)
        self.register_buffer("numbers", torch.empty(count, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.get_buffer("numbers")] @ self.columns.t()

    def rest(self, x: Tensor) -> Tensor:
        return x.index_fill(-1, self.get_buffer("numbers"), 0)


class KeepsOutliers(Branching):
    needs = (AbsMax,)

    def __init__(self, settings: OutliersConfig) -> None:
        self._count = settings.count

    def branch(self, site: BranchSite) -> Branch | None:
        return None if site.name.endswith("v_proj") else Outliers(self._count, site.shape, site.dtype)

    def weight_to_round(self, task: BranchTask) -> Tensor:
        return task.weight.index_fill(1, self._numbers(task), 0)

    def tensors(self, task: BranchTask) -> Mapping[str, Tensor]:
        numbers = self._numbers(task)
        return {"columns": task.weight[:, numbers], "numbers": numbers}

    def _numbers(self, task: BranchTask) -> Tensor:
        statistic = task.statistic(AbsMax)
        size = task.weight.abs().amax(0) if statistic is None else statistic.value
        return size.argsort(descending=True, stable=True)[: self._count]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    for name, settings in (("outliers", "OutliersConfig"), ("others", "OthersConfig")):
        processor = f"{__name__}:KeepsOutliers"
        algorithms().register(AlgorithmRecord(name=name, kind="branch", config=f"{__name__}:{settings}", processor=processor))
    yield
    for name in ("outliers", "others"):
        if name in algorithms():
            algorithms().unregister(name)


def config(scheme: str = "int4_wo_32", *algorithm: str, **options: Any) -> QConfig:
    own = LLMTemplate.get("llama").get_config(scheme=scheme, algorithm=list(algorithm) or None, **options)
    own.algo_config = [*(own.algo_config or []), OutliersConfig()]
    return own


RUNS: dict[str, QConfig] = {
    "to nearest": config(),
    "with inputs": config("ptpc_fp8"),
    "with static inputs and cache": config("int8", kv_cache_scheme="fp8"),
    "beside GPTQ": config("int4_wo_32", "gptq"),
    "beside a transform and two forwards": config("int4_wo_32", "awq", "gptaq"),
    "in two passes": attrs.evolve(config("int4_wo_32", "gptq"), activation_memory=0),
    "behind a tuning": config("int4_wo_32", "tuning"),
}


@pytest.mark.parametrize("name", RUNS)
def test_memory_and_disk_give_the_same_bytes_and_readers_the_same_logits(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = saved(tmp_path / "float", torch.float32)
    quantize_checkpoint(source, tmp_path / "disk", RUNS[name], batches())
    model: Any = ModelQuantizer(RUNS[name]).quantize_model(load_model(source), batches())
    export_with("safetensors", model, tmp_path / "memory")
    assert first_difference(contents(tmp_path / "disk"), contents(tmp_path / "memory")) is None
    branches: dict[str, Any] = {n: m for n, m in model.named_modules() if isinstance(m, Branch)}
    assert [n for n, branch in branches.items() if not branch.columns.any()] == [], "each is made"
    assert {n.split(".")[-2] for n in branches} == {"q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    for again in (
        import_model_from_safetensors(None, tmp_path / "disk", device="cpu"),
        import_model_from_safetensors(None, tmp_path / "disk", device="cpu", packed=True),
        AutoModelForCausalLM.from_pretrained(tmp_path / "disk", local_files_only=True),
    ):
        assert torch.equal(logits(again), logits(model))


def test_channels_that_a_branch_takes_reach_neither_quantizer() -> None:
    model = ModelQuantizer(config("ptpc_fp8")).quantize_model(small_model(), batches())
    layer: Any = model.get_submodule("model.layers.0.mlp.up_proj")
    numbers = layer.branch.numbers
    assert not layer.weight[:, numbers].any()
    x = torch.randn(3, layer.in_features)
    large = x.index_fill(-1, numbers, 1e4)
    rest = x.index_fill(-1, numbers, 0)
    without: Any = layer.product(rest)
    with torch.no_grad():
        assert torch.equal(layer(large), without + layer.branch(large)), "the scale of the input is that of the rest"


def test_a_layer_outside_the_blocks_has_its_branch_without_statistics() -> None:
    whole = config()
    whole.exclude = []
    model: Any = ModelQuantizer(whole).quantize_model(small_model(), batches())
    expected = small_model().lm_head.weight.abs().amax(0).argsort(descending=True, stable=True)[:4]
    assert torch.equal(model.lm_head.branch.numbers, expected)
    assert model.lm_head.branch.columns.any()


def layouts() -> list[ExporterRecord]:
    return [one for one in exporters() if one.exporter is not None and one.name != "safetensors"]


@pytest.mark.parametrize("layout", layouts(), ids=lambda one: one.name)
def test_a_layout_without_a_place_refuses_before_data_are_asked_for(layout: ExporterRecord, tmp_path: Path) -> None:
    for package in {"gguf": ("gguf",), "onnx": ("onnx", "onnxscript")}.get(layout.name, ()):
        pytest.importorskip(package)

    def data(_: Any) -> Any:
        raise AssertionError("data were asked for")

    with pytest.raises(UnsupportedError, match=rf"outliers|'{layout.name}' has no place for branches beside layers.*q_proj") as caught:
        quantize_checkpoint(saved(tmp_path / "float"), tmp_path / "out", config(), data, exporter=layout.name)
    assert "Layouts that hold this model: safetensors" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_one_run_has_one_algorithm_that_puts_branches() -> None:
    two = config()
    two.algo_config = [OutliersConfig(), OthersConfig()]
    with pytest.raises(ConfigError, match="'outliers' and 'others' both add branches to layers, but a run can have only one"):
        plan_run(small_model(), two)


def test_the_plan_says_that_there_are_branches() -> None:
    (note,) = [note for note in plan_run(small_model(), config()).plan.notes if "branches" in note]
    assert note == "outliers adds branches to layers; a branch is computed when its layer is rounded"


def test_without_the_algorithm_reading_stops_and_names_it(tmp_path: Path) -> None:
    export_with("safetensors", ModelQuantizer(config()).quantize_model(small_model(), batches()), tmp_path / "out")
    algorithms().unregister("outliers")
    with pytest.raises(MissingPluginError, match="the model needs the algorithm 'outliers' to run"):
        import_model_from_safetensors(None, tmp_path / "out", device="cpu")
