"""Errors for a lack of memory or disk say what to do, in the program and in Python, and never "report it"."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import quark.checkpoint.destination as destination
import quark.models.hf.file_tensors as file_tensors
import quark.models.hf.shards as shards
import quark_workbench.data.text_files as text_files
from quark.base.shortages import advise, shortage
from quark.config.templates.template import LLMTemplate
from quark.errors import CheckpointError, OutputError, QuarkError
from quark.models.hf.json_files import reading
from quark.plugins.attribution import Origin, attributed
from quark.plugins.discovery import Source
from quark.runs.from_disk import quantize_checkpoint
from quark.torch import ModelQuantizer
from quark_tiny_model import tiny_model, tiny_model_dir
from quark_workbench.cli.main import main


def of_number(number: int) -> OSError:
    return OSError(number, os.strerror(number), "/some/file")


SHORTAGES: dict[str, tuple[Callable[[], Exception], str]] = {
    "memory": (MemoryError, "activation-memory"),
    "memory of torch": (
        lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        "activation-memory",
    ),
    "memory of a GPU": (lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "activation-memory"),
    "memory of a library": (lambda: ImportError("x.so: failed to map segment from shared object"), "activation-memory"),
    "memory of the system": (lambda: of_number(errno.ENOMEM), "activation-memory"),
    "threads": (lambda: RuntimeError("can't start new thread"), "OMP_NUM_THREADS"),
    "files": (lambda: of_number(errno.EMFILE), "ulimit -n"),
    "files of the system": (lambda: of_number(errno.ENFILE), "ulimit -n"),
    "files of a library": (lambda: RuntimeError("unable to open file: Too many open files"), "ulimit -n"),
    "permission": (lambda: of_number(errno.EACCES), "permissions"),
    "space": (lambda: of_number(errno.ENOSPC), "no space left"),
}
CONFIG = LLMTemplate.get("llama").get_config(scheme="int4_wo_64")


def raising(error: BaseException) -> Callable[..., Any]:
    def fails(*args: object, **kwargs: object) -> Any:
        raise error

    return fails


def said_by_program(error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr("quark.runs.from_disk.quantize_blocks", raising(error))
    monkeypatch.setattr("sys.argv", ["quark", "quantize", str(tiny_model_dir()), "out", "--scheme", "int4_wo_64"])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("what", SHORTAGES)
def test_the_program_says_what_to_do(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, fix = SHORTAGES[what]
    error = make()
    monkeypatch.chdir(tmp_path)
    said = said_by_program(error, monkeypatch, capsys)
    assert fix in said or (isinstance(error, OSError) and "could not be written" in said)
    assert "report it" not in said


@pytest.mark.parametrize("what", SHORTAGES)
def test_python_says_what_to_do_and_keeps_the_type(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, fix = SHORTAGES[what]
    error = make()
    monkeypatch.setattr("quark.runs.model_quantizer.quantize_run", raising(error))
    with pytest.raises(type(error)) as caught:
        ModelQuantizer(CONFIG).quantize_model(tiny_model())
    assert any(fix in note for note in caught.value.__notes__)


@pytest.mark.parametrize("what", SHORTAGES)
def test_no_reader_and_no_plugin_is_blamed(what: str, tmp_path: Path) -> None:
    error = SHORTAGES[what][0]()
    with pytest.raises(type(error)), reading(tmp_path, "fetch it again"):
        raise error
    with pytest.raises(type(error)), attributed("rounding", Origin("the algorithm 'mine'", Source("mine"))):
        raise error


@pytest.mark.parametrize("what", ["memory", "files"])
@pytest.mark.parametrize(("module", "function"), [(shards, "safe_open"), (file_tensors, "open_file")])
def test_a_shard_is_not_called_damaged(module: Any, function: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = SHORTAGES[what][0]()

    monkeypatch.setattr(module, function, raising(error))
    with pytest.raises((type(error), OutputError)) as caught:
        quantize_checkpoint(tiny_model_dir(), tmp_path / "out", CONFIG)
    assert not isinstance(caught.value, CheckpointError)


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'gptqmodel'", name="gptqmodel"), ImportError("needs gptqmodel")])
def test_a_package_that_is_missing_is_said_by_name(
    error: ImportError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = said_by_program(error, monkeypatch, capsys)
    assert "gptqmodel" in said
    assert "install" in said
    assert "report it" not in said
    assert "damaged" not in said


def test_text_that_may_not_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text")
    monkeypatch.setattr(text_files, "_decompressed", raising(PermissionError(errno.EACCES, "Permission denied", str(text))))
    monkeypatch.setattr(
        "sys.argv",
        ["quark", "quantize", str(tiny_model_dir()), str(tmp_path / "out"), "--scheme", "fp8", "--calib", str(text), "--num-calib", "1"],
    )
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert f"Permission denied: '{text}'" in said
    assert "change its permissions" in said
    assert "report it" not in said


def test_an_output_below_a_directory_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_dir", raising(PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(OutputError, match=r"out' cannot be accessed \(Permission denied\)\. Choose a place that you may read and write"):
        destination.refuse_used_directory(tmp_path / "out")


def test_what_a_machine_lacks_is_found_behind_other_errors_and_said_once() -> None:
    error = QuarkError("of ours")
    error.__cause__ = ValueError("of another kind")
    error.__cause__.__cause__ = MemoryError()
    advise(error)
    advise(error)
    assert error.__notes__ == [shortage(error)]
    assert shortage(ValueError("of another kind")) is None
