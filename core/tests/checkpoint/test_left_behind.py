"""If an export fails and leaves files behind, the message describes these files correctly."""

import errno
import shutil
from pathlib import Path

import pytest

from quark.checkpoint import atomic_directory
from quark.checkpoint.atomic_directory import JOURNAL, building
from quark.errors import OutputError


def _export(out: Path, error: OSError | None = None, text: str = "x") -> None:
    with building(out) as directory:
        (directory / "config.json").write_text(text)
        if error is not None:
            raise error


@pytest.mark.parametrize("has_journal", [False, True])
def test_a_name_that_the_disk_may_not_hold_is_a_warning_about_a_complete_output(
    has_journal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def sync(path: Path) -> None:
        if path == tmp_path and (tmp_path / "out").exists():
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(atomic_directory, "sync", sync)
    with building(tmp_path / "out") as directory:
        (directory / "a").write_text("x")
        if has_journal:
            (directory.parent / JOURNAL).write_text("header\nblock\n")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert "out' is complete, but the system could not confirm" in caplog.text
    assert "finished block" not in caplog.text


def test_a_replaced_output_is_not_called_finished_blocks_when_the_disk_fails_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At this time, the earlier export is in the temporary directory, beside the journal."""
    block = '{"quantization_config": {"quant_method": "quark", "global_quant_config": {}}, "n": %d}'
    _export(tmp_path / "out", text=block % 1)
    real = atomic_directory.sync

    def sync(path: Path) -> None:
        if path == tmp_path and "2" in (tmp_path / "out" / "config.json").read_text():
            raise OSError(errno.EIO, "Input/output error")
        real(path)

    monkeypatch.setattr(atomic_directory, "sync", sync)
    with building(tmp_path / "out", overwrite=True) as directory:
        (directory / "config.json").write_text(block % 2)
        (directory.parent / JOURNAL).write_text("header\nblock\n")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "config.json").read_text() == block % 2
    assert "is complete" in caplog.text
    assert "finished block" not in caplog.text


@pytest.mark.posix("Windows moves no directory with an open file")
def test_what_was_moved_away_meanwhile_is_not_called_removed(tmp_path: Path) -> None:

    def run() -> None:
        with building(tmp_path / "parent" / "out") as directory:
            (directory.parent / JOURNAL).write_text("header\nblock\n")
            (tmp_path / "parent").rename(tmp_path / "elsewhere")
            (directory / "a").write_text("x")

    with pytest.raises(OutputError, match="or a directory above it was moved") as caught:
        run()
    assert "Nothing was left behind" not in str(caught.value)
    assert len(list((tmp_path / "elsewhere").glob(".out.*/journal.jsonl"))) == 1


def test_what_could_not_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    with pytest.raises(OutputError, match=r"'.*\.partial' could not be removed") as caught:
        _export(tmp_path / "out", OSError(errno.EIO, "Input/output error"))
    assert "Nothing was left behind" not in str(caught.value)


def test_a_disk_that_has_no_place_for_the_lock_file_keeps_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(atomic_directory, "open_file", full)
    with pytest.raises(OutputError, match="Nothing was left behind"):
        _export(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
