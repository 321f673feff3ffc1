"""What happens to the output of a run while it works ends in the right bytes, or in an error that is true."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quark.errors import OutputError
from quark.runs import quantize_checkpoint
from quark.runs.sink import JournaledSink

from .interrupted import BLOCKS, DATA, config, files

SHARD = "checkpoint/model.safetensors"


def copied(path: Path) -> None:
    """Let another file with the same bytes take the place of a file."""
    copy = path.with_suffix(".copy")
    shutil.copy(path, copy)
    copy.replace(path)


def removed(directory: Path) -> None:
    """Remove a directory in which a thread of the run may still make files."""
    while directory.exists():
        shutil.rmtree(directory, ignore_errors=True)


def occupied(out: Path, name: str) -> None:
    out.mkdir()
    (out / name).write_text("precious")


def linked(out: Path, partial: Path) -> None:
    (out.parent / "empty").mkdir()
    out.symlink_to(out.parent / "empty")


DISTURBANCES: dict[str, tuple[Callable[[Path, Path], object], str | None]] = {
    "its weights are removed": (lambda out, partial: (partial / SHARD).unlink(), "was removed, replaced or truncated"),
    "its weights are replaced": (lambda out, partial: copied(partial / SHARD), "was removed, replaced or truncated"),
    "its directory is removed": (lambda out, partial: removed(partial), "was removed, replaced|No such file"),
    "its directory is renamed": (lambda out, partial: partial.rename(partial.with_name("other")), "was removed, replaced|was moved during"),
    "the directory above is renamed": (
        lambda out, partial: out.parent.rename(out.parent.with_name("other")),
        "was removed, replaced|was moved",
    ),
    "the output appears, empty": (lambda out, partial: out.mkdir(), None),
    "the output appears, with a file": (lambda out, partial: occupied(out, "notes.txt"), r"is not empty \(it holds 'notes\.txt'"),
    "the output appears, with a tokenizer": (lambda out, partial: occupied(out, "tokenizer_config.json"), None),
    "a file takes its name": (lambda out, partial: out.write_text("precious"), "is a file. Choose a directory"),
    "a link takes its name": (linked, "could not be written"),
}


@pytest.fixture(scope="module")
def once(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("once") / "out"
    quantize_checkpoint(source, out, config("gptq"), DATA)
    return files(out)


@pytest.mark.posix("Windows lets nobody remove, replace or rename open files")
@pytest.mark.parametrize(("what", "words"), DISTURBANCES.values(), ids=DISTURBANCES)
@pytest.mark.parametrize("behind", [1, BLOCKS])
def test_a_disturbed_output_is_the_right_one_or_an_error(
    what: Callable[[Path, Path], object],
    words: str | None,
    behind: int,
    once: dict[str, bytes],
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "place" / "out"
    out.parent.mkdir()
    plain, count = JournaledSink.end_block, 0

    def disturbing(sink: JournaledSink, block: object, *rest: object) -> None:
        nonlocal count
        plain(sink, block, *rest)  # type: ignore[arg-type]
        count += 1
        if count == behind:
            (partial,) = out.parent.glob(".out.*.partial")
            what(out, partial)

    monkeypatch.setattr(JournaledSink, "end_block", disturbing)
    if words is None:
        quantize_checkpoint(source, out, config("gptq"), DATA)
        assert {name: data for name, data in files(out).items() if name != "tokenizer_config.json"} == once
        assert [path.name for path in out.parent.iterdir()] == ["out"]
        return
    with pytest.raises(OutputError, match=words) as caught:
        quantize_checkpoint(source, out, config("gptq"), DATA)
    left = [path for path in tmp_path.rglob("*") if path.name.endswith(".partial") or path.name == "other"]
    assert not left or "Nothing was left behind" not in str(caught.value)
    assert not (out / "config.json").exists()
    if out.is_file() or (out.exists() and not out.is_symlink()):
        assert [path.read_text() for path in ([out] if out.is_file() else out.iterdir())] == ["precious"]
