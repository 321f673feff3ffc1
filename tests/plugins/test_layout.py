"""A third party's checkpoint layouts are written, recognized, and read back to the same logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from quark.checkpoint.transformers_loading import register_layouts
from quark.errors import AmbiguousNameError, CheckpointError, OutputError
from quark.models.layers import QuantizedLayer
from quark.plugins import Catalog, ExporterRecord, Source, exporters, using
from quark.plugins.discovery import discover
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_tiny_model import tiny_model

IDS = torch.arange(1, 17)[None]
LAYOUTS = pytest.mark.parametrize("layout", ["box", "single_file"])


def quantized(scheme: str = "int4_wo_64") -> nn.Module:
    model: nn.Module = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme=scheme)).quantize_model(tiny_model())
    return model


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    found: Tensor = model(IDS).logits
    return found


@LAYOUTS
@pytest.mark.parametrize("scheme", ["int4_wo_64", "uint4_wo_32", "mxfp4_weight_only"])
def test_it_reads_back_what_it_has_written(third_party: Catalog, layout: str, scheme: str, tmp_path: Path) -> None:
    model = quantized(scheme)
    export_safetensors(model, tmp_path / "out", custom_mode=layout)
    again = import_model_from_safetensors(None, tmp_path / "out", device="cpu")
    assert torch.equal(logits(again), logits(model))
    rows = [(row.name, row.config) for row in model.quark_plan.quantized]
    assert [(row.name, row.config) for row in again.quark_plan.quantized] == rows


def test_transformers_reads_it_once_the_layouts_are_registered(third_party: Catalog, tmp_path: Path) -> None:
    model = quantized()
    export_safetensors(model, tmp_path / "out", custom_mode="box")
    register_layouts()
    assert register_layouts() == []
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    assert torch.equal(logits(again), logits(model))
    assert sum(isinstance(module, QuantizedLayer) for module in again.modules()) == len(model.quark_plan.quantized)


def test_transformers_cannot_read_files_of_a_layouts_own_and_says_what_can(third_party: Catalog, tmp_path: Path) -> None:
    export_safetensors(quantized(), tmp_path / "out", custom_mode="single_file")
    register_layouts()
    with pytest.raises(ValueError, match=r"cannot read the files of the layout 'single_file'.*import_model_from_safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)


def test_without_the_plugin_reading_stops_and_says_which_methods_are_read(third_party: Catalog, tmp_path: Path) -> None:
    export_safetensors(quantized(), tmp_path / "out", custom_mode="box")
    with using(Catalog(discover())), pytest.raises(CheckpointError, match=r"quant_method 'third-party-box', which no installed.*'quark'"):
        import_model_from_safetensors(None, tmp_path / "out")


@LAYOUTS
def test_an_earlier_export_is_replaced_on_request_alone(third_party: Catalog, layout: str, tmp_path: Path) -> None:
    model = quantized()
    export_safetensors(model, tmp_path / "out", custom_mode=layout)
    with pytest.raises(OutputError, match="overwrite=True"):
        export_safetensors(model, tmp_path / "out", custom_mode=layout)
    export_safetensors(model, tmp_path / "out", custom_mode="quark", overwrite=True)
    export_safetensors(model, tmp_path / "out", custom_mode=layout, overwrite=True)
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out", device="cpu")), logits(model))


def lose(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.0.mlp.up_proj.box_scale"]


def rename(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.9.mlp.up_proj.box_scale"] = tensors.pop("model.layers.0.mlp.up_proj.box_scale")


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [(lose, r"lacks 1 tensor\(s\): model\.layers\.0\.mlp\.up_proj"), (rename, r"'model\.layers\.9\..*no place")],
)
def test_damage_is_found_for_it(third_party: Catalog, damage: Callable[[dict[str, Tensor]], None], complaint: str, tmp_path: Path) -> None:
    export_safetensors(quantized(), tmp_path / "out", custom_mode="box")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=complaint):
        import_model_from_safetensors(None, tmp_path / "out")


@pytest.mark.parametrize("value", [3, {"global_quant_config": 3}, None])
def test_a_configuration_that_cannot_be_used_names_the_file(third_party: Catalog, value: object, tmp_path: Path) -> None:
    export_safetensors(quantized(), tmp_path / "out", custom_mode="box")
    path = tmp_path / "out" / "config.json"
    data = json.loads(path.read_text())
    data["quantization_config"]["layer_quant_config"] = data["quantization_config"]["global_quant_config"] = value
    path.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=r"quantization_config in '.*config\.json' (cannot be used|does not fit)"):
        import_model_from_safetensors(None, tmp_path / "out")


def test_two_layouts_that_fit_alike_are_an_error_that_names_both(third_party: Catalog, tmp_path: Path) -> None:
    export_safetensors(quantized(), tmp_path / "out", custom_mode="box")
    box = "third_party.box:BoxReader"
    record = ExporterRecord(name="rival", exporter="third_party.box:BoxExporter", reader=box, quant_methods=("third-party-box",))
    exporters().register(record, Source("rival-quant", "1.0"))
    with pytest.raises(AmbiguousNameError, match=r"'box' of plugin 'layout' of third-party.* and 'rival' of rival-quant 1\.0"):
        import_model_from_safetensors(None, tmp_path / "out")


def test_a_reader_needs_to_say_what_it_reads() -> None:
    with pytest.raises(ValueError, match="quant_methods"):
        ExporterRecord(name="mute", exporter="third_party.box:BoxExporter", reader="third_party.box:BoxReader")
