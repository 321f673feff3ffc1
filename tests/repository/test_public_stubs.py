"""Type checkers see AMD Quark's public modules by stub files, which list the names that the modules have at run time."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from quark_amd.finder import public_names
from tools.public_stubs import ROOT, SHARED, main, out_of_date, references, stubs

pytestmark = pytest.mark.thorough

DOCUMENTED = """
from __future__ import annotations

from torch import nn

from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.algorithm.awq.awq import AwqProcessor
from quark.torch.export import ExporterConfig, JsonExporterConfig, ModelExporter
from quark.torch.export.api import ModelExporter as SameExporter
from quark.torch.quantization import AWQConfig, Config, GPTQConfig, Int4PerGroupSpec
from quark.torch.quantization.config.config import QConfig, QLayerConfig, QTensorConfig, QuantizationConfig
from quark.torch.quantization.config.type import Dtype, QSchemeType
from quark.torch.quantization.observer.observer import PerTensorMinMaxObserver


def quantize(model: nn.Module, name: str) -> nn.Module:
    config: QConfig = LLMTemplate.get(name).get_config(scheme="int4_wo_128")
    return ModelQuantizer(config).quantize_model(model)


spec: QTensorConfig = Int4PerGroupSpec(group_size=128, ch_axis=-1).to_quantization_spec()
layer: QLayerConfig = QuantizationConfig(weight=spec)
same: Config = QConfig(global_quant_config=layer, algo_config=[AWQConfig(), GPTQConfig()])
dtype: Dtype = Dtype.int4
"""
WRONG = """
from quark.torch.quantization.config.type import Dtpye
from quark.torch.quantization.config.config import QConfig
from quark.torch.export.main_export import nothing

config: int = QConfig()

from quark.torch import ModelQuantizer, nothing_either

quantizer: str = ModelQuantizer(config)
"""


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the messages of mypy, in strict mode, about two programs that use the public modules; torch is not looked at.

    The sources are on the path of the interpreter, where an editable installation puts them.
    """
    directory = tmp_path_factory.mktemp("programs")
    (directory / "documented.py").write_text(DOCUMENTED)
    (directory / "wrong.py").write_text(WRONG)
    (directory / "mypy.ini").write_text(
        "[mypy]\nstrict = True\nfollow_imports = silent\nexplicit_package_bases = True\n"
        "[mypy-torch.*,transformers.*]\nfollow_imports = skip\n"
    )
    sources = ":".join(str(path) for path in [ROOT / "core/src", *sorted(ROOT.glob("plugins/*/src"))])
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", "--no-error-summary"]
    environment = {**os.environ, "PYTHONPATH": sources}
    done = subprocess.run(
        [*command, "documented.py", "wrong.py"], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_stubs_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    assert out_of_date() == [], "python -m tools.public_stubs --write"
    monkeypatch.setattr(sys, "argv", ["public_stubs"])
    assert main() == 0


def test_a_stub_that_is_missing_or_of_no_module_is_out_of_date(tmp_path: Path) -> None:
    for path, text in stubs().items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert out_of_date(tmp_path) == []
    folder = tmp_path / "plugins/quark_amd/src/quark-stubs/torch/export"
    (folder / "api.pyi").unlink()
    (folder / "nothing.pyi").write_text("")
    (folder / "__init__.pyi").write_text("")
    assert [Path(path).name for path in out_of_date(tmp_path)] == ["__init__.pyi", "api.pyi", "nothing.pyi"]


def test_stubs_have_the_names_that_modules_have_at_run_time() -> None:
    for module, names in references().items():
        if module != SHARED:
            assert all(hasattr(import_module(module), name) for name in names), module
            assert {n for n in names if not n.startswith("_")} <= {*public_names(module)}, module


def test_documented_imports_are_seen_by_type_checkers(messages: list[str]) -> None:
    assert [line for line in messages if not line.startswith("wrong.py")] == []


@pytest.mark.parametrize("message", [
    'has no attribute "Dtpye"', 'has no attribute "nothing"', 'has no attribute "nothing_either"', 'variable has type "int"',
    'variable has type "str"',
])  # fmt: skip
def test_names_that_are_not_there_and_wrong_types_are_errors_of_type_checkers(message: str, messages: list[str]) -> None:
    assert [line for line in messages if message in line]
