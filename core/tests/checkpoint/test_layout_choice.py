"""The layout that reads a checkpoint is found, and errors name broken readers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from quark.checkpoint import Exporter, LayoutReader, StoredConfig, export_safetensors, import_model_from_safetensors, map_to_quark
from quark.checkpoint.layout_reader import layout_for
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.errors import CheckpointError, PluginError, UnsupportedError
from quark.models.plan.quant_plan import QuantPlan
from quark.plugins import Catalog, ExporterRecord, Source, exporters, using
from quark.plugins.discovery import discover
from quark.torch import LLMTemplate, ModelQuantizer
from quark_tiny_model import tiny_model

PATH = Path("config.json")


class Writer(Exporter):
    def export(self, *_: Any) -> None:
        """Nothing is written by these tests."""


class Reader(LayoutReader):
    def configuration(self, block: Mapping[str, Any], directory: Path) -> StoredConfig:
        return StoredConfig(config=QConfig(QLayerConfig()))

    def prepare(self, model: nn.Module, stored: StoredConfig) -> QuantPlan:
        return QuantPlan((), stored.config)


class RaisesInPrepare(Reader):
    def prepare(self, model: nn.Module, stored: StoredConfig) -> QuantPlan:
        raise RuntimeError("half way")


class RaisesInConfiguration(Reader):
    def configuration(self, block: Mapping[str, Any], directory: Path) -> StoredConfig:
        raise KeyError("half")


class ReturnsNoPlan(Reader):
    def prepare(self, model: nn.Module, stored: StoredConfig) -> Any:
        return None


class ReturnsNoConfiguration(Reader):
    def configuration(self, block: Mapping[str, Any], directory: Path) -> Any:
        return dict(block)


class CannotBeMade(Reader):
    def __init__(self) -> None:
        raise ValueError("no luck")


class NoPlaces:
    configuration, prepare = Reader.configuration, Reader.prepare


class DerivesFromNothing(NoPlaces):
    place_of = Reader.place_of


def register(name: str, **fields: Any) -> None:
    fields = {"exporter": f"{__name__}:Writer", "quant_methods": ("box",)} | fields
    exporters().register(ExporterRecord(name=name, **fields), Source("box-quant", "0.3"))


@pytest.fixture
def registry() -> Iterator[None]:
    """A registry of this test's own, to register layouts in."""
    with using(Catalog(discover())):
        yield


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "out"
    export_safetensors(ModelQuantizer(LLMTemplate.get("llama").get_config(scheme="int4_wo_64")).quantize_model(tiny_model()), out)
    path = out / "config.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"quantization_config": {"quant_method": "box"}}))
    return out


@pytest.mark.usefixtures("registry")
def test_the_layout_with_the_most_marks_that_fit_is_taken() -> None:
    register("plain", reader=f"{__name__}:Reader")
    register("marked", reader=f"{__name__}:Reader", marks={"format": "a"})
    register("twice", reader=f"{__name__}:Reader", marks={"format": "a", "order": "b"})
    found = [layout_for({"quant_method": "box", **marks}, PATH) for marks in ({}, {"format": "a"}, {"format": "a", "order": "b"})]
    assert found == ["plain", "marked", "twice"]
    assert layout_for({"quant_method": "box", "format": "other"}, PATH) == "plain"
    assert exporters().fitting({"quant_method": "other"}) == []


@pytest.mark.usefixtures("registry")
def test_a_layout_without_a_reader_is_named() -> None:
    register("writer-only")
    with pytest.raises(CheckpointError, match=r"the layout 'writer-only' of box-quant 0\.3.*can write the layout but cannot read it"):
        layout_for({"quant_method": "box"}, PATH)


def test_without_the_distribution_that_brings_layouts_the_error_says_what_to_install() -> None:
    with using(Catalog()), pytest.raises(CheckpointError, match="pip install quark-exporters"):
        layout_for({"quant_method": "quark"}, PATH)


@pytest.mark.parametrize("value", [None, 3, ["quark"], {"a": 1}, "Quark"])
def test_a_method_of_any_json_type_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match="which no installed layout reads"):
        layout_for({"quant_method": value}, PATH)


def test_transformers_entry_refuses_methods_that_no_layout_reads() -> None:
    with pytest.raises(UnsupportedError, match=r"custom_mode 'hqq' cannot be read.*Installed layouts read .*'quark'"):
        map_to_quark(nn.Linear(2, 2), QConfig(QLayerConfig()), custom_mode="hqq")


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("reader", "complaint"),
    [
        ("RaisesInPrepare", "box-quant 0.3.* raised RuntimeError: half way"),
        ("RaisesInConfiguration", "box-quant 0.3.* raised KeyError: 'half'"),
        ("CannotBeMade", "the exporter 'box' of box-quant 0.3 raised ValueError: no luck"),
        ("ReturnsNoPlan", "box-quant 0.3 returns None from 'prepare' instead of a QuantPlan"),
        ("ReturnsNoConfiguration", "box-quant 0.3 returns a dict from 'configuration' instead of a StoredConfig"),
        ("NoPlaces", "has no 'place_of'"),
        ("DerivesFromNothing", "has a reader that does not derive from quark.checkpoint.LayoutReader"),
    ],
)
def test_a_broken_reader_is_named(reader: str, complaint: str, export: Path) -> None:
    register("box", reader=f"{__name__}:{reader}")
    with pytest.raises(PluginError, match=complaint):
        import_model_from_safetensors(None, export)


@pytest.mark.usefixtures("registry")
def test_tensors_that_do_not_fit_the_place_that_a_reader_gives_are_an_error(export: Path) -> None:
    register("box", reader=f"{__name__}:Reader")
    with pytest.raises(CheckpointError, match=r"has the shape .* instead of .*: the export is damaged"):
        import_model_from_safetensors(None, export)
