"""An export appears under its name only when complete; nothing is overwritten, and a failure leaves nothing."""

import errno
import stat
from pathlib import Path

import pytest

from quark.errors import OutputError
from quark.export.place import building, refuse_used_directory


def test_a_complete_export_is_renamed_into_place(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with building(out) as directory:
        (directory / "a").write_text("x")
        assert not out.exists()
    assert [p.name for p in out.iterdir()] == ["a"]
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_everybody_may_read_an_export(tmp_path: Path) -> None:
    """It is built in a temporary directory, which nobody but its maker may enter."""
    with building(tmp_path / "out") as directory:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o755


def _fail(out: Path, error: Exception) -> None:
    with building(out) as directory:
        (directory / "a").write_text("x")
        raise error


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        _fail(tmp_path / "out", ZeroDivisionError())
    assert list(tmp_path.iterdir()) == []


def test_no_space_left_is_told_with_its_cure_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="no space left on the device; free some"):
        _fail(tmp_path / "out", OSError(errno.ENOSPC, "No space left on device"))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_use_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(OutputError, match="not empty"):
        refuse_used_directory(tmp_path)
    with pytest.raises(OutputError, match="not empty"), building(tmp_path):
        pass
    assert (tmp_path / "precious").read_text() == "x"


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with building(tmp_path / "out") as directory:
        (directory / "a").write_text("x")
    assert (tmp_path / "out" / "a").is_file()


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(OutputError, match="is a file"):
        refuse_used_directory(tmp_path / "out")
