"""CheckpointExporter: a layout with its own packing streams, resumes and reloads by its `LayerStorage`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from quark.checkpoint import CheckpointContent, CheckpointExporter, CodedLayer, ExportOptions, StorageReader, model_tensors
from quark.checkpoint.content import content_of
from quark.checkpoint.export import exporter_of
from quark.checkpoint.model_tensors import scale_suffixes
from quark.checkpoint.shard_writer import ShardWriter
from quark.config.layer import QLayerConfig
from quark.errors import UnsupportedError
from quark.models.layers import QuantizerModule
from quark.models.plan.decoder_blocks import Block
from quark.numbers import QParams
from quark.plugins import ExporterRecord, documented_object, exporters, schemes
from quark_devkit.small_models import quantized, run_config
from quark_devkit.whole_runs import require_reload, require_same_from_disk, require_same_when_resumed

SCHEME = "int4_wo_32"


@attrs.frozen
class WideStorage:
    """Codes of 16 bits, transposed."""

    def why_not(self, config: QLayerConfig, shape: tuple[int, ...]) -> str | None:
        return None if config.input_tensors is None else "it has no place for scales of inputs"

    def stored(self, layer: CodedLayer) -> dict[str, Tensor]:
        return {"wide": layer.codes.to(torch.int16).t().contiguous(), "step": layer.qparams.scale}

    def restored(self, config: QLayerConfig, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> CodedLayer:
        return CodedLayer(config, tensors["wide"].t().to(torch.int8).contiguous(), QParams(tensors["step"]))


class WideExporter(CheckpointExporter):
    layout = "wide"
    storage = WideStorage()

    def quantization_config(self, content: CheckpointContent, options: ExportOptions) -> dict[str, Any]:
        return {"quant_method": "wide"}


class WideReader(StorageReader):
    storage = WideStorage()

    def layers(self, block: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, QLayerConfig]:
        config = schemes().load_config(SCHEME)()
        return {name.removesuffix(".wide"): config for name in stored if name.endswith(".wide")}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    wide = {"exporter": f"{__name__}:WideExporter", "reader": f"{__name__}:WideReader", "quant_methods": ("wide",)}
    exporters().register(ExporterRecord(name="wide", capabilities={"streaming", "resumable"}, **wide))  # type: ignore[arg-type]
    yield
    exporters().unregister("wide")


@pytest.mark.parametrize("options", [ExportOptions(), ExportOptions(max_shard_bytes=20_000)], ids=["one file", "shards"])
def test_a_run_from_disk_and_a_resumed_one_write_the_bytes_of_an_export_from_memory(options: ExportOptions) -> None:
    require_same_from_disk(run_config(SCHEME), "wide", options)
    require_same_when_resumed(run_config(SCHEME), "wide", options)


def test_an_export_reads_back_to_the_same_logits() -> None:
    require_reload(quantized(run_config(SCHEME)), "wide")


def test_a_part_is_made_when_the_one_before_is_being_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At most two parts are in memory."""
    events: list[str] = []
    stored, write = WideStorage.stored, ShardWriter.write

    def recorded(self: WideStorage, layer: CodedLayer) -> dict[str, Tensor]:
        events.extend(() if layer.codes.is_meta else ("made",))
        return stored(self, layer)

    def written(self: ShardWriter, tensors: Mapping[str, Tensor]) -> None:
        events.append("written")
        write(self, tensors)

    monkeypatch.setattr(WideStorage, "stored", recorded)
    monkeypatch.setattr(ShardWriter, "write", written)
    monkeypatch.setattr(model_tensors, "_SMALL", 1)
    model = quantized(run_config(SCHEME))
    WideExporter().export(content_of(model), tmp_path, ExportOptions())
    assert events.count("made") > 7
    assert ("made", "made") not in set(pairwise(events))


def test_a_run_whose_export_merges_scales_of_the_cache_does_not_go_on(tmp_path: Path) -> None:
    model, options = quantized(run_config(SCHEME)), ExportOptions(kv_cache_group=("*k_proj", "*v_proj"))
    refused = pytest.raises(UnsupportedError, match="kv_cache_group cannot be resumed")
    with WideExporter().stream(content_of(model), model, tmp_path, options) as stream, refused:
        stream.adopt(Block("model.layers.0", model.get_submodule("model.layers.0")), {})


def test_layers_without_a_place_and_rounded_values_are_refused_in_one_message() -> None:
    model = quantized(run_config("fp8"))
    says = r"'wide' cannot hold this model: it stores codes.*; it has no place for scales of inputs \(.*layers"
    with pytest.raises(UnsupportedError, match=says) as refusal:
        exporter_of("wide").check(content_of(model), model, ExportOptions(weight_format="fake_quantized"))
    assert "rounded values;" in str(refusal.value), "what holds of the whole model names no layers"


def test_activations_have_scales_in_a_checkpoint_where_they_are_static() -> None:
    static = documented_object("Int8PerTensorSpec")().to_quantization_spec()
    modules = {"static": QuantizerModule(static, activation=True), "dynamic": QuantizerModule(static.set(is_dynamic=True), activation=True)}
    suffixes = {name: scale_suffixes(module, ExportOptions()) for name, module in modules.items()}
    assert suffixes == {"static": ["scale", "zero_point"], "dynamic": []}
    assert scale_suffixes(None, ExportOptions()) == []
