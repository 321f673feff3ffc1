"""The example of each hook is laid out as a distribution and collected, and its references are loaded."""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import attrs
import pytest
import torch

from quark.calibration.report import CalibrationReport
from quark.config.layer import QLayerConfig
from quark.plugins import BlockFinished, Catalog, QuarkHooks, RunStarted
from quark.plugins.measuring import LayersRounded
from quark.plugins.record_fields import KEY
from quark.plugins.registries import KINDS

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/acme_quant/src/acme_quant"
HOOKS = [name for name in dir(QuarkHooks) if name.startswith("quark_")]


def files_of(hook: str) -> dict[str, str]:
    """Return the files of a hook's example by path."""
    text = inspect.getdoc(getattr(QuarkHooks, hook)) or ""
    assert text.count("Example::") == 1, f"{hook} has no example"
    parts = re.split(r"^# (acme_quant/\w+\.py)\n", dedent(text.split("Example::\n")[1]).lstrip("\n"), flags=re.MULTILINE)
    assert parts[0] == ""
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with the example distribution."""
    before = set(sys.modules)
    shutil.copytree(EXAMPLE, tmp_path / "acme_quant", ignore=shutil.ignore_patterns("__pycache__"))
    info = tmp_path / "acme_quant-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-quant\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[quark]\nacme = acme_quant.plugin\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_quant"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "acme_quant":
            del sys.modules[name]


def collected(folder: Path, hook: str) -> Catalog:
    """The plugins of the folder, with the example of one hook."""
    for path, code in files_of(hook).items():
        (folder / path).write_text(code)
    importlib.invalidate_caches()
    return Catalog.installed([str(folder)], {"QUARK_STRICT_PLUGINS": "1"})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.plural)
def test_the_example_of_a_provider_hook_registers_something_that_loads(kind, installed: Path) -> None:  # type: ignore[no-untyped-def]
    registry = collected(installed, kind.hook).registries[kind.plural]
    (record,) = [record for record in registry if registry.source(record.name).distribution == "acme-quant"]
    assert record.summary
    for field in attrs.fields(type(record)):
        if KEY in field.metadata and getattr(record, field.name) is not None:
            assert getattr(registry, f"load_{field.name}")(record.name) is not None


def test_the_scheme_of_the_example_has_its_option(installed: Path) -> None:
    schemes = collected(installed, "quark_register_schemes").schemes
    layer = schemes.load_config("acme_w8")(group_size=32)
    assert isinstance(layer, QLayerConfig)
    assert layer.weight.group_size == 32  # type: ignore[union-attr]
    assert [str(option) for option in schemes.options("acme_w8")] == ["group_size=64 (int)"]


def test_the_listener_of_the_example_hears(installed: Path, caplog: pytest.LogCaptureFixture) -> None:
    catalog = collected(installed, "quark_on_event")
    with caplog.at_level("INFO", "acme_quant"):
        catalog.emit(BlockFinished(block="model.layers.0", number=1, total=3, seconds_left=8.0))
        catalog.emit(RunStarted())
    assert caplog.messages == ["model.layers.0 of 3, 8 s left"]


def test_the_example_that_measures_adds_a_figure_to_the_report(installed: Path) -> None:
    catalog, report = collected(installed, "quark_measure"), CalibrationReport()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    torch.nn.init.constant_(model[0].weight, -3)
    catalog.measure(LayersRounded(block="", model=model, layers={"0": model[0]}, inputs={}, report=report))
    assert report.weights == {"0": {"acme_largest": 3.0}}


def test_every_hook_has_an_example() -> None:
    assert len(HOOKS) == len(KINDS) + 2
    assert all(files_of(hook) for hook in HOOKS)
