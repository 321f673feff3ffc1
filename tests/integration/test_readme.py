"""The README's code runs as it stands, on the bundled model."""

import re
import sys
import types
from pathlib import Path

import pytest
import torch

import quark
from quark.plugins import SchemeRecord
from quark.plugins.catalog import catalog
from quark.torch import LLMTemplate, ModelQuantizer
from quark_tiny_model import tiny_model, tiny_model_dir
from quark_workbench.cli.installed import kind_report

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def run(code: str, module: types.ModuleType) -> dict[str, object]:
    """Execute a block as a module of its own."""
    exec(compile(code, "README.md", "exec"), module.__dict__)
    return module.__dict__


def test_the_first_two_commands_are_the_first_lines_of_code() -> None:
    first = re.search(r"```\n(.*?)```", README, flags=re.DOTALL)
    assert first is not None
    assert [line.split("#")[0].strip() for line in first.group(1).splitlines()] == ["make demo", "make test"]


def test_it_is_short_and_has_two_tables() -> None:
    assert len(README.splitlines()) <= 100
    assert len(re.findall(r"^\|[-|]+\|$", README, flags=re.MULTILINE)) == 2


def test_the_command_that_installs_a_clone_names_core_the_workbench_and_every_plugin_distribution() -> None:
    line = re.search(r"^pip install (\./.*)$", README, flags=re.MULTILINE)
    assert line is not None
    named = [path for pattern in line[1].split() for path in ROOT.glob(pattern) if path.is_dir()]
    assert all((path / "pyproject.toml").is_file() for path in named)
    wanted = [ROOT / "core", ROOT / "workbench", *(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]
    assert sorted(named) == sorted(wanted)


def test_the_number_of_schemes_and_families_is_that_of_those_that_are_registered() -> None:
    for plural, title in (("schemes", "schemes"), ("templates", "model families")):
        rows = kind_report(catalog(), plural)[plural]
        built_in = [row for row in rows if row["source"]["distribution"].startswith("quark-")]
        assert f"| {title} | {len(built_in)}: " in README


def test_the_ten_lines_of_python_quantize_export_and_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = BLOCKS[0].replace("path/to/SmolLM2-135M", str(tiny_model_dir()))
    found = run(code, types.ModuleType("readme"))
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(found["quantized"](ids).logits, found["model"](ids).logits)
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 10


def test_the_choices_shown_are_configurations() -> None:
    module = types.ModuleType("readme")
    module.__dict__["LLMTemplate"] = LLMTemplate
    run(BLOCKS[1], module)
    assert len(BLOCKS[1].splitlines()) == 4


def test_the_plugin_of_ten_lines_registers_a_scheme_that_quantizes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("acme_quant.plugin")
    monkeypatch.setitem(sys.modules, "acme_quant", types.ModuleType("acme_quant"))
    monkeypatch.setitem(sys.modules, "acme_quant.plugin", module)
    found = run(BLOCKS[2], module)
    (record,) = found["quark_register_schemes"]()
    assert isinstance(record, SchemeRecord)
    quark.schemes().register(record)
    try:
        model = ModelQuantizer(LLMTemplate.get("llama").get_config("acme_int8_wo")).quantize_model(tiny_model())
    finally:
        quark.schemes().unregister(record.name)
    assert model.model.layers[0].mlp.up_proj.weight.unique().numel() <= 256
