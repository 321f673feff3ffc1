"""Rotations of a checkpoint, with one block in memory at a time.

The bytes are those of a run in memory, whatever the options.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import quark_tiny_model as tiny
from quark.checkpoint import export_safetensors
from quark.config.model import QConfig
from quark.models.plan.decoder_blocks import Block
from quark.models.plan.family import architecture_of
from quark.runs import ModelQuantizer, quantize_checkpoint
from quark.runs.source import CheckpointSource
from quark.torch import LLMTemplate
from quark_algos.rotation.config import RotationConfig
from quark_algos.rotation.norm_form import form_of
from quark_devkit.whole_runs import contents

DATA = [ids[None] for ids in torch.randint(0, 96, (6, 24), generator=torch.Generator().manual_seed(0))]
OPTIONS: dict[str, dict[str, Any]] = {
    "r1": {},
    "random r1 in blocks": {"random_r1": True, "rotation_size": 32},
    "r2": {"r1": False, "r2": True},
    "r1, r2": {"r2": True, "random_r2": True},
    "r3": {"r3": True},
    "r4": {"r1": False, "r4": True},
    "r1 online": {"online_r1_rotation": True, "r4": True},
    "all": {"r2": True, "r3": True, "r4": True},
}


def model_dir(directory: Path, *, is_tied: bool, dtype: torch.dtype = torch.bfloat16) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=is_tied)
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 2)
    model.to(dtype).save_pretrained(directory)
    return directory


def rotated(preset: str, scheme: str = "int4_wo_32", *algorithms: str, **options: Any) -> QConfig:
    cache = {"kv_cache_scheme": "fp8"} if options.get("r3") else {}
    config = LLMTemplate.get("llama").get_config(scheme, algorithm=["rotation", *algorithms], **cache)
    changes = {"preset": preset, **options}
    config.algo_config = [attrs.evolve(a, **changes) if isinstance(a, RotationConfig) else a for a in config.algo_config or []]
    return config


def in_memory(source: Path, out: Path, config: QConfig, data: list[Tensor] | None) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    export_safetensors(ModelQuantizer(config).quantize_model(model, data), out)


@pytest.fixture
def most_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks had tensors in memory, after each block was loaded.

    Loading the whole model is an error.
    """
    counts: list[int] = []
    load = CheckpointSource.load

    def counted(self: CheckpointSource, block: Block | None) -> None:
        load(self, block)
        layers: Any = self.model.model.layers  # type: ignore[union-attr]
        counts.append(sum(not all(p.is_meta for p in layer.parameters()) for layer in layers))

    def refused(self: CheckpointSource) -> None:
        raise AssertionError("the whole model is read")

    monkeypatch.setattr(CheckpointSource, "load", counted)
    monkeypatch.setattr(CheckpointSource, "load_all", refused)
    return counts


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("options", [*OPTIONS.values()], ids=OPTIONS)
def test_the_bytes_are_those_of_a_run_in_memory(options: dict[str, Any], is_tied: bool, most_blocks: list[int], tmp_path: Path) -> None:
    source = model_dir(tmp_path / "float", is_tied=is_tied)
    config = rotated("reference", **options)
    data = DATA if options.get("r3") else None
    quantize_checkpoint(source, tmp_path / "disk", config, data)
    in_memory(source, tmp_path / "memory", config, data)
    assert contents(tmp_path / "disk") == contents(tmp_path / "memory")
    assert max(most_blocks) == 1


@pytest.mark.thorough
@pytest.mark.one_in(2)
@pytest.mark.parametrize("preset", ["best", "reference"])
@pytest.mark.parametrize("algorithms", [(), ("gptq",), ("smoothquant",), ("awq", "gptq")], ids=str)
def test_so_they_are_with_validation_and_other_algorithms(
    preset: str, algorithms: tuple[str, ...], most_blocks: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = model_dir(tmp_path / "float", is_tied=True)
    config = rotated(preset, "int4_wo_32", *algorithms, r2=True, r4=True)
    plan = quantize_checkpoint(source, tmp_path / "disk", config, DATA)
    assert "without validation" not in caplog.text
    in_memory(source, tmp_path / "memory", config, DATA)
    assert contents(tmp_path / "disk") == contents(tmp_path / "memory")
    assert max(most_blocks) == 1
    assert preset == "best" or any(a.name == "rotation" for a in plan.config.algo_config or ())


def test_a_rotation_that_is_left_out_leaves_no_trace(most_blocks: list[int], tmp_path: Path) -> None:
    """The head stays tied, and no matrix is in the files.

    They are those of a run without rotation but for the notes of the plan.
    """
    source = model_dir(tmp_path / "float", is_tied=True)
    plan = quantize_checkpoint(source, tmp_path / "with", rotated("best", "mxfp4", r4=True), DATA)
    if any(a.name == "rotation" for a in plan.config.algo_config or ()):
        pytest.skip("rotation reduces the error of this model")
    quantize_checkpoint(source, tmp_path / "without", LLMTemplate.get("llama").get_config("mxfp4"), DATA)
    assert contents(tmp_path / "with") == contents(tmp_path / "without")


def test_layers_that_the_user_names_are_rotated_so_too(most_blocks: list[int], tmp_path: Path) -> None:
    source = model_dir(tmp_path / "float", is_tied=True)
    derived = RotationConfig.for_architecture(architecture_of(tiny.tiny_model()))  # type: ignore[arg-type]
    assert derived is not None
    assert isinstance(derived.scaling_layers, dict)
    reordered = {
        part: [dict(entry) | {"next_modules": entry["next_modules"][::-1]} for entry in of_part]
        for part, of_part in derived.scaling_layers.items()
    }
    config = rotated("reference", scaling_layers=reordered)
    quantize_checkpoint(source, tmp_path / "disk", config)
    in_memory(source, tmp_path / "memory", config, None)
    assert contents(tmp_path / "disk") == contents(tmp_path / "memory")
    assert max(most_blocks) == 1


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.RMSNorm(8)], ids=["LayerNorm", "RMSNorm"])
def test_the_form_of_a_norm_is_measured_without_its_weights(norm: nn.Module) -> None:
    expected = form_of(norm, 8)
    assert expected == (isinstance(norm, nn.LayerNorm), False)
    on_meta = norm.to("meta")
    assert form_of(on_meta, 8) == expected
    assert all(p.is_meta for p in on_meta.parameters())
