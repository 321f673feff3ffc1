"""Broken exporters, and weights that cannot be stored as they are.

Errors name the exporter, and no files stay at the checkpoint's path.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quark.checkpoint import CheckpointContent, Exporter, ExportOptions, export_safetensors
from quark.checkpoint.destination import RUN_FILE
from quark.checkpoint.export import export_with
from quark.errors import ConfigError, OutputError, PluginError
from quark.models.layers import QuantizedLayer
from quark.plugins import ExporterRecord, Source, exporters
from quark.runs import ModelQuantizer, quantize_checkpoint
from quark.torch import LLMTemplate
from quark_tiny_model import tiny_model, tiny_model_dir

CONFIG = LLMTemplate.get("llama").get_config(scheme="int4_wo_64")


class Sound(Exporter):
    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        (out / "a.bin").write_bytes(b"a")


class RaisesHalfWay(Exporter):
    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        (out / "a.bin").write_bytes(b"a")
        (out / "inner").mkdir()
        raise RuntimeError("half way")


class WritesNothing(Exporter):
    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        """Nothing."""


class DiskFull(Exporter):
    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        (out / "a.bin").write_bytes(b"a")
        raise OSError(errno.ENOSPC, "No space left on device")


class NoExport:
    """A class that is no exporter."""


class NotDerived:
    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        (out / "a.bin").write_bytes(b"a")


class CannotBeMade(Sound):
    def __init__(self) -> None:
        raise ValueError("no luck")


def in_memory(out: Path) -> None:
    export_with("broken", ModelQuantizer(CONFIG).quantize_model(tiny_model()), out)


def from_disk(out: Path) -> None:
    quantize_checkpoint(tiny_model_dir(), out, CONFIG, exporter="broken")


WAYS = pytest.mark.parametrize("write", [in_memory, from_disk])


@pytest.fixture
def registered(request: pytest.FixtureRequest) -> Iterator[None]:
    exporters().register(ExporterRecord(name="broken", exporter=f"{__name__}:{request.param}"), Source("broken-quant", "0.3"))
    yield
    exporters().unregister("broken")


def exporter(name: str) -> Any:
    return pytest.mark.parametrize("registered", [name], indirect=True)


@WAYS
@exporter("Sound")
def test_what_a_sound_one_writes_is_moved_to_its_place(registered: None, write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.name for path in (tmp_path / "out").iterdir()} - {RUN_FILE} == {"a.bin"}


@WAYS
@pytest.mark.parametrize(
    ("registered", "complaint"),
    [("RaisesHalfWay", "raised RuntimeError: half way .*while writing"), ("WritesNothing", "has written nothing to")],
    indirect=["registered"],
)
def test_one_that_fails_is_named_and_leaves_nothing(
    registered: None, complaint: str, write: Callable[[Path], None], tmp_path: Path
) -> None:
    with pytest.raises(PluginError, match=f"the exporter 'broken' of broken-quant 0.3 {complaint}"):
        write(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@WAYS
@exporter("DiskFull")
def test_a_full_disk_is_no_fault_of_the_plugin(registered: None, write: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="no space left"):
        write(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("registered", "complaint"),
    [
        ("NoExport", "which has no 'export'"),
        ("NotDerived", "does not derive from quark.checkpoint.Exporter"),
        ("CannotBeMade", "raised ValueError: no luck"),
    ],
    indirect=["registered"],
)
def test_one_that_cannot_work_is_refused_before_any_work(registered: None, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=complaint):
        # The source is none: it would be missed as soon as work began.
        quantize_checkpoint(tmp_path / "nowhere", tmp_path / "out", CONFIG, exporter="broken")
    assert list(tmp_path.iterdir()) == []


def nan(layer: Any) -> None:
    layer.weight.data[0, 0] = torch.nan


def trained(layer: Any) -> None:
    layer.weight.data.add_(1e-3)


def no_scale(layer: Any) -> None:
    layer.weight_quantizer.scale.zero_()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (nan, "it holds NaN or Inf"),
        (trained, "it holds values that no code represents"),
        (no_scale, "has a scale that is NaN, infinite, zero"),
    ],
)
def test_weights_that_were_changed_after_they_were_rounded_are_not_stored_in_silence(
    change: Callable[[Any], None], complaint: str, tmp_path: Path
) -> None:
    model = ModelQuantizer(CONFIG).quantize_model(tiny_model())
    change(next(m for m in model.modules() if isinstance(m, QuantizedLayer)))
    with pytest.raises(ConfigError, match=rf"'model.layers.0.self_attn.q_proj.weight' cannot be stored as int4: .*{complaint}"):
        export_safetensors(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
