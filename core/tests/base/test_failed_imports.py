"""An error names the library that cannot be imported, whatever exception the import raises."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from quark.base.shortages import refuse_failed_import
from quark.errors import CheckpointError, EnvironmentConflictError
from quark.models.hf.json_files import reading
from quark_workbench.data import hub

SAID = "operator torchvision::nms does not exist"


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path with a module that cannot be imported, and a module that imports it."""
    (tmp_path / "torchvision.py").write_text(f"raise RuntimeError({SAID!r})")
    (tmp_path / "lazy_library.py").write_text("import torchvision")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def read_by_lazy_import(module: str) -> None:
    """Raise the exception that the lazy modules of transformers raise."""
    try:
        importlib.import_module(module)
    except RuntimeError as error:
        raise ModuleNotFoundError("Could not import module 'LlamaConfig'. Are this object's requirements defined correctly?") from error


@pytest.mark.parametrize("read", [importlib.import_module, read_by_lazy_import])
@pytest.mark.usefixtures("libraries")
def test_the_first_cause_is_told_and_the_checkpoint_is_not_blamed(read: object) -> None:
    with pytest.raises(EnvironmentConflictError) as caught, reading(Path("config.json"), "it is damaged"):
        read("lazy_library")  # type: ignore[operator]
    assert str(caught.value).startswith(f"'config.json' cannot be read, because torchvision cannot be imported (RuntimeError: {SAID})")
    assert "damaged" not in str(caught.value)


@pytest.mark.parametrize(("error", "library"), [(ImportError("no", name="timm.layers"), "timm"), (ImportError("needs timm"), "a library")])
def test_a_library_that_is_not_there_is_named_if_the_error_does(error: ImportError, library: str) -> None:
    with pytest.raises(EnvironmentConflictError, match=f"it fails, because {library} cannot be imported"):
        refuse_failed_import(error, "it fails")


def test_other_errors_and_those_of_code_in_a_checkpoint_stay(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers_modules", raising=False)  # of tests that have loaded such code
    (libraries / "transformers_modules.py").write_text("raise ValueError('no such activation')")
    with pytest.raises(CheckpointError, match="it is damaged"), reading(Path("config.json"), "it is damaged"):
        importlib.import_module("transformers_modules")
    with pytest.raises(CheckpointError, match="it is damaged"), reading(Path("config.json"), "it is damaged"):
        raise ValueError("a number is wanted")


@pytest.mark.usefixtures("libraries")
def test_a_data_set_is_not_blamed_on_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = SimpleNamespace(load_dataset=lambda *_, **__: importlib.import_module("torchvision"))
    monkeypatch.setitem(sys.modules, "datasets", datasets)  # type: ignore[arg-type]
    with pytest.raises(EnvironmentConflictError, match="torchvision cannot be imported"):
        hub._rows("wikitext", None, "train")


@pytest.mark.thorough
def test_a_library_that_transformers_finds_broken_is_named(tmp_path: Path) -> None:
    (tmp_path / "accelerate.py").write_text(f"raise RuntimeError({SAID!r})")
    (tmp_path / "accelerate-99.0.dist-info").mkdir()
    (tmp_path / "accelerate-99.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 99.0\n")
    code = "from quark.models.hf.loading import load_model; from quark_tiny_model import tiny_model_dir; load_model(tiny_model_dir())"
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False)
    last = run.stderr.splitlines()[-1]
    assert "EnvironmentConflictError" in last
    assert f"accelerate cannot be imported (RuntimeError: {SAID})" in last
