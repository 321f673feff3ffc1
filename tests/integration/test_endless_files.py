"""No file that a user may name is read without end: a pipe, or a device, is refused."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quark.errors import ConfigError, QuarkError
from quark.torch.quantization import load_quant_algo_config_from_file
from quark_tiny_model import tiny_model_dir
from quark_workbench.data.sources import read_samples
from quark_workbench.template_file import read_template_file

from .program import run

pytestmark = pytest.mark.posix("pipes and devices have no names on Windows")
PLAN = ("--scheme", "int4_wo_32")
GPTQ = (*PLAN, "--algorithm", "gptq", "--num-calib", 1, "--seq-len", 32)
MODEL = "{model}"
NAMED: dict[str, tuple[object, ...]] = {
    "--calib": ("quantize", tiny_model_dir(), "{out}", *GPTQ, "--calib", "{file}"),
    "--calib of a source": ("quantize", tiny_model_dir(), "{out}", *GPTQ, "--calib", "json_lines", "--calib-option", "path={file}"),
    "--text": ("evaluate", tiny_model_dir(), "--seq-len", 32, "--text", "{file}"),
    "--template-file": ("plan", tiny_model_dir(), *PLAN, "--template-file", "{file}"),
    "model": ("quantize", "{file}", "{out}", *PLAN),
    "reference": ("evaluate", tiny_model_dir(), "--seq-len", 32, "--reference", "{file}"),
    "inspect": ("inspect", "{file}"),
    "report": ("report", "{file}"),
}
"""What a user may name, with the command."""
INSIDE = {
    "config.json": ("plan", MODEL, *PLAN),
    "generation_config.json": ("plan", MODEL, *PLAN),
    "model.safetensors": ("quantize", MODEL, "{out}", *PLAN),
    "model.safetensors.index.json": ("quantize", MODEL, "{out}", *PLAN),
    "tokenizer.json": ("evaluate", MODEL, "--seq-len", 32, "--text", "{text}"),
    "tokenizer_config.json": ("evaluate", MODEL, "--seq-len", 32, "--text", "{text}"),
    "chat_template.jinja": ("evaluate", MODEL, "--seq-len", 32, "--limit", 1, "--text", "{text}"),
    "modules.json": ("quantize", MODEL, "{out}", *PLAN),
    "LICENSE": ("quantize", MODEL, "{out}", *PLAN),
    "quark_report.json": ("report", MODEL),
}
"""Files of a checkpoint, with a command that reads them."""
KINDS = ("pipe", "/dev/zero", "link to a pipe", "link to /dev/zero")


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    """End the test if it waits, or reads on."""

    def late(number: int, frame: object) -> None:
        pytest.fail("it waits, or reads without end")  # no exception, which would be taken for one of the file

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(15)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def endless(path: Path, kind: str) -> Path:
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "/dev/zero":
            path.symlink_to("/dev/zero")
        case "link to a pipe":
            os.mkfifo(path.with_name(".pipe"))
            path.symlink_to(".pipe")
        case _:
            path.with_name(".zero").symlink_to("/dev/zero")
            path.symlink_to(".zero")
    return path


def filled(arguments: tuple[object, ...], **places: object) -> list[str]:
    return [str(argument).format_map(places) if "{" in str(argument) else str(argument) for argument in arguments]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", NAMED)
def test_no_file_that_a_user_names_is_read_without_end(
    what: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = endless(tmp_path / "named", kind)
    assert run(*filled(NAMED[what], file=file, out=tmp_path / "out"), monkeypatch=monkeypatch) == 2
    said = capsys.readouterr().err
    assert str(file) in said
    assert "--debug" not in said


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", INSIDE)
def test_no_file_of_a_checkpoint_is_read_without_end(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(tiny_model_dir(), tmp_path / "m"))
    (tmp_path / "text").write_text("a text, again and again, " * 50)
    endless(model / name, kind)
    arguments = filled(INSIDE[name], model=model, out=tmp_path / "out", text=tmp_path / "text")
    assert run(*arguments, monkeypatch=monkeypatch) in (0, 2)
    assert "--debug" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("read", [load_quant_algo_config_from_file, read_template_file, lambda path: list(read_samples(path))])
def test_no_file_that_a_program_names_is_read_without_end(read: Callable[[Path], object], kind: str, tmp_path: Path) -> None:
    with pytest.raises(QuarkError, match="named'"):
        read(endless(tmp_path / "named", kind))


@pytest.mark.parametrize("read", [load_quant_algo_config_from_file, read_template_file])
def test_a_file_that_is_nested_deeply_is_told(read: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text('{"a":' * 200_000)
    with pytest.raises(ConfigError, match=r"deep\.json' is nested too deeply"):
        read(tmp_path / "deep.json")
