"""Hooks and tensors that an algorithm leaves in a model are put back when a checkpoint is read, by its
restorer.

Without it, reading stops.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor, nn

import quark_tiny_model as tiny
from quark.algorithms import Transform
from quark.checkpoint.restorers import restorers_of
from quark.config.algorithm import AlgoConfig, StoredAlgoConfig
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.errors import CheckpointError, MissingPluginError, UnsupportedError
from quark.plugins import AlgorithmRecord, algorithms
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors

LAYER = "model.layers.0.mlp.down_proj"
IDS = torch.arange(40).reshape(1, 40)


@attrs.define(kw_only=True)
class LouderConfig(AlgoConfig):
    """Multiplies a layer's input by a stored factor while the model runs."""

    name: str = "louder"
    layer: str = LAYER

    def runs_with_model(self) -> bool:
        return bool(self.layer)


class Louder(Transform):
    """The transform and its restorer."""

    works_by_block = False

    def __init__(self, settings: LouderConfig) -> None:
        self._layer = settings.layer

    def apply_global(self, model: nn.Module) -> None:
        self.restore(model, None)
        model.get_buffer("loudness").fill_(3)

    def apply(self, block: object) -> dict[str, dict[str, float]]:
        return {}

    def restore(self, model: nn.Module, config: object) -> None:
        model.register_buffer("loudness", torch.zeros(()))

        def louder(layer: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            return (args[0] * model.get_buffer("loudness"),)

        model.get_submodule(self._layer).register_forward_pre_hook(louder)

    def place_of(self, name: str, tensor: Tensor) -> str:
        return "loudness" if name == "its.older.name" else name


@pytest.fixture
def registered() -> Iterator[None]:
    here = __name__
    algorithms().register(
        AlgorithmRecord(
            name="louder", kind="transform", config=f"{here}:LouderConfig", processor=f"{here}:Louder", restorer=f"{here}:Louder"
        )
    )
    yield
    if "louder" in algorithms():
        algorithms().unregister("louder")


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found


def louder_export(out: Path) -> Tensor:
    config = LLMTemplate.get("llama").get_config("int4_wo_32")
    config.algo_config = [LouderConfig()]
    model = ModelQuantizer(config).quantize_model(tiny.tiny_model())
    export_safetensors(model, out)
    assert not torch.equal(logits(model), logits(ModelQuantizer(attrs.evolve(config, algo_config=None)).quantize_model(tiny.tiny_model())))
    return logits(model)


@pytest.mark.usefixtures("registered")
def test_hook_and_tensor_of_an_algorithm_are_there_again_by_both_readers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    expected = louder_export(tmp_path / "out")
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out", device="cpu")), expected)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)), expected)


@pytest.mark.usefixtures("registered")
def test_a_tensor_of_another_name_goes_where_the_algorithm_says(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    expected = louder_export(tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    tensors["its.older.name"] = tensors.pop("loudness")
    save_file(tensors, file, metadata={"format": "pt"})
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out", device="cpu")), expected)


@pytest.mark.usefixtures("registered")
def test_without_the_algorithm_reading_stops_and_names_it(tmp_path: Path) -> None:
    louder_export(tmp_path / "out")
    algorithms().unregister("louder")
    with pytest.raises(MissingPluginError, match=r"needs the algorithm 'louder' to run.*pip install"):
        import_model_from_safetensors(None, tmp_path / "out", device="cpu")
    path = tmp_path / "out" / "config.json"
    data = json.loads(path.read_text())
    del data["quantization_config"]["run_time_algorithms"]  # as another writer would leave it
    path.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=r"'loudness'.*algorithm louder, which is not installed"):
        import_model_from_safetensors(None, tmp_path / "out", device="cpu")


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("weight_format", ["real_quantized", "fake_quantized"])
def test_an_export_says_what_runs_with_the_model_and_warns_of_vllm(
    weight_format: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = LLMTemplate.get("llama").get_config("int4_wo_32")
    config.algo_config = [LouderConfig()]
    model = ModelQuantizer(config).quantize_model(tiny.tiny_model())
    export_safetensors(model, tmp_path / "out", weight_format=weight_format)
    assert len([r for r in caplog.records if "vLLM without quark-vllm" in r.message]) == 1
    data = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert data["run_time_algorithms"] == ["louder"]


def test_algorithms_that_leave_nothing_need_not_be_installed() -> None:
    config = QConfig(QLayerConfig(), algo_config=[StoredAlgoConfig(name="unheard_of", settings={"a": 1})])
    assert restorers_of(config) == []
    assert "run_time_algorithms" not in config.to_dict()


@pytest.mark.parametrize(("layer", "names"), [(LAYER, ["louder"]), ("", [])])
def test_which_algorithms_run_with_the_model_is_stored_and_comes_back(layer: str, names: list[str]) -> None:
    data = QConfig(QLayerConfig(), algo_config=[LouderConfig(layer=layer)]).to_dict()
    assert data.get("run_time_algorithms", []) == names
    again = QConfig.from_dict(data)
    assert [a.runs_with_model() for a in again.algo_config or ()] == [bool(names)]
    assert again.to_dict() == data


@pytest.mark.usefixtures("registered")
def test_an_algorithm_that_cannot_put_back_what_it_left_is_named() -> None:
    algorithms().unregister("louder")
    algorithms().register(AlgorithmRecord(name="louder", kind="transform", config=f"{__name__}:LouderConfig"))
    with pytest.raises(UnsupportedError, match=r"needs the algorithm 'louder' to run.*cannot restore it"):
        restorers_of(QConfig(QLayerConfig(), algo_config=[LouderConfig()]))
