"""An export appears under its name only when complete.

Nothing is overwritten, and a failure leaves nothing.
"""

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from quark.base.files import open_own, try_lock
from quark.base.interrupts import termination_unwinds, uninterrupted
from quark.checkpoint.atomic_directory import JOURNAL, Leftover, building, finished_blocks, refuse_unfinished_run
from quark.checkpoint.destination import refuse_used_directory
from quark.errors import OutputError, ResumeError


def test_a_complete_export_is_renamed_into_place(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with building(out) as directory:
        (directory / "a").write_text("x")
        assert not out.exists()
    assert [p.name for p in out.iterdir()] == ["a"]
    assert [p.name for p in out.parent.iterdir()] == ["out"]


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


@pytest.mark.parametrize("name", ["source/model.safetensors", "calibration.txt", ".other.12345678.partial/checkpoint/a"])
def test_an_error_about_a_file_of_another_place_is_not_one_of_the_output(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=name):
        _fail(tmp_path / "out", FileNotFoundError(errno.ENOENT, "No such file or directory", str(tmp_path / name)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["out", "out/a", ".out.12345678.partial/checkpoint/a", "."])
def test_an_error_about_a_file_of_the_output_is_one_of_the_output(name: str, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="could not be written"):
        _fail(tmp_path / "out", PermissionError(errno.EACCES, "Permission denied", str(tmp_path / name)))


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


@pytest.mark.posix("few users of Windows may make links")
@pytest.mark.parametrize("target", ["there", "missing", "deep/missing"])
def test_the_directory_that_a_link_points_to_is_written_and_the_link_stays(target: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.symlink_to(target)
    (tmp_path / "there").mkdir()
    refuse_used_directory(out)
    with building(out) as directory:
        (directory / "a").write_text("x")
    assert out.is_symlink()
    assert (tmp_path / target / "a").read_text() == "x"
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("out", [".", "new/..", "../here"])
def test_the_current_directory_is_refused_before_any_work(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(OutputError, match="is the current directory, which cannot be replaced"), building(Path(out)):
        pass
    assert list(tmp_path.iterdir()) == [tmp_path / "here"]


@pytest.mark.parametrize("out", [".", "new/..", "../here"])
def test_the_current_directory_is_no_mount_point(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "new").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(OutputError, match="is the current directory, which cannot be replaced"):
        refuse_used_directory(Path(out))


@pytest.mark.posix("links are allowed to few users of Windows")
def test_a_link_to_another_file_system_is_no_mount_point_and_one_to_a_mount_point_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mount" / "inside").mkdir(parents=True)
    (tmp_path / "out").symlink_to("mount/inside")
    (tmp_path / "all").symlink_to("mount")
    # Python 3.11 compares the device of a link's target with that of the link's own directory.
    monkeypatch.setattr(Path, "is_mount", lambda path: path.is_symlink() or path == tmp_path / "mount")
    refuse_used_directory(tmp_path / "out")
    with pytest.raises(OutputError, match="is a mount point"):
        refuse_used_directory(tmp_path / "all")


def test_a_mount_point_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    with pytest.raises(OutputError, match=r"is a mount point, which cannot be replaced\. Choose a directory in it, such as '.*model'"):
        refuse_used_directory(tmp_path)


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(OutputError, match="is a file"):
        refuse_used_directory(tmp_path / "out")


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt.

    Else it does not where a shell ignores it, as it does for jobs in the background.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_a_second_interrupt_comes_when_the_first_has_been_cleaned_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        rmtree(*arguments, **options)

    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _fail(tmp_path / "out", ZeroDivisionError())
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """A shell starts background jobs with SIGINT ignored, since Ctrl-C is for another program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with termination_unwinds(), building(tmp_path / "out") as directory:
        signal.raise_signal(signal.SIGINT)
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
        (directory / "a").write_text("x")
    assert (tmp_path / "out" / "a").is_file()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


BUILDER = """
import signal, sys, time
from pathlib import Path
from quark_workbench.cli import main
from quark.checkpoint.atomic_directory import JOURNAL, Leftover, building, finished_blocks, refuse_unfinished_run

signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell that started the tests does with it

def build():
    with building(Path(sys.argv[1])) as directory:
        (directory / "half").write_text("x")
        print("building", flush=True)
        time.sleep(120)

main.program = lambda: build
main.main()
"""


@pytest.fixture
def builder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is in the middle of an export to ``tmp_path / "out"``."""
    command = [sys.executable, "-c", BUILDER, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "building\n", process.stderr and process.stderr.read()
        yield process
        process.kill()


def _build(out: Path) -> None:
    with building(out) as directory:
        (directory / "a").write_text("x")
    shutil.rmtree(out)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_asks_the_program_to_end_leaves_nothing(
    number: signal.Signals, builder: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert [p.suffix for p in tmp_path.iterdir()] == [".partial"]
    builder.send_signal(number)
    assert builder.wait(60) in (128 + number, -number)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_leaves_is_removed_by_the_next_and_what_a_live_one_builds_is_not(
    builder: subprocess.Popen[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (partial,) = tmp_path.iterdir()
    with pytest.raises(OutputError, match=f"^process {builder.pid} is writing to .*Wait until it has ended"):
        _build(tmp_path / "out")
    assert (partial / "checkpoint" / "half").is_file()
    builder.kill()
    builder.wait(60)
    _build(tmp_path / "another")
    assert list(tmp_path.iterdir()) == [partial]
    with caplog.at_level("INFO"):
        _build(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    assert f"Removed '{partial}'" in caplog.text


def test_a_kill_before_the_lock_file_goes_leaves_what_the_next_run_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(path: Path, **options: Any) -> None:
        if path.suffix == ".partial":  # its lock is free by now: Windows removes no open file
            lock = open_own(path / "owner.lock")
            assert lock is not None
            assert try_lock(lock)
            os.close(lock)
        else:
            rmtree(path, **options)

    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", killed)
    _build(tmp_path / "out")
    (partial,) = tmp_path.iterdir()
    assert [path.name for path in partial.iterdir()] == ["owner.lock"]
    monkeypatch.undo()
    _build(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def _unlocked(directory: Path, content: str | None) -> Path:
    directory.mkdir()
    (directory / "precious").write_text("x")
    if content is not None:
        (directory / "owner.lock").write_text(content)
    return directory


def test_what_is_not_known_to_be_left_behind_is_kept(tmp_path: Path) -> None:
    elsewhere = _unlocked(tmp_path / "elsewhere", "process 1\n")
    kept = [
        _unlocked(tmp_path / ".out.aaaaaaaa.partial", None),  # of somebody else
        _unlocked(tmp_path / ".out.bbbbbbbb.partial", ""),  # its owner is about to lock it
        _unlocked(tmp_path / ".out.longer_than_ours.partial", "process 1\n"),
        _unlocked(tmp_path / ".outer.aaaaaaaa.partial", "process 1\n"),
    ]
    with suppress(OSError):  # Windows allows links to few users
        (tmp_path / ".out.cccccccc.partial").symlink_to(elsewhere)
    _build(tmp_path / "out")
    assert all((directory / "precious").is_file() for directory in (*kept, elsewhere))


def test_a_name_of_wildcards_matches_itself_alone(tmp_path: Path) -> None:
    other = _unlocked(tmp_path / ".outs.aaaaaaaa.partial", "process 1\n")
    own = _unlocked(tmp_path / ".out[s].aaaaaaaa.partial", "process 1\n")  # Windows allows no star
    _build(tmp_path / "out[s]")
    assert (other.exists(), own.exists()) == (True, False)


def test_the_directory_has_the_rights_that_the_umask_leaves(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        with building(tmp_path / "out"):
            pass
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750


def _left(out: Path, blocks: int) -> Path:
    """Return the directory that an export leaves when it fails after ``blocks`` finished blocks."""
    with suppress(ZeroDivisionError), building(out) as directory:
        _write_half(directory, blocks)
        raise ZeroDivisionError
    return directory.parent


def _write_half(directory: Path, blocks: int) -> None:
    (directory / "half").write_text("x")
    (directory.parent / JOURNAL).write_text("a line\n" * (1 + blocks) + "half a line")


def test_finished_blocks_outlast_an_error_and_no_block_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _left(tmp_path / "out", 0)
    assert list(tmp_path.iterdir()) == []
    partial = _left(tmp_path / "out", 2)
    assert finished_blocks(partial) == 2
    assert f"2 finished blocks are in '{partial}'" in caplog.text


@pytest.mark.parametrize("leftover", ["refuse", "resume", "restart"])
def test_finished_blocks_are_refused_continued_or_discarded(leftover: Leftover, tmp_path: Path) -> None:
    partial = _left(tmp_path / "out", 1)
    if leftover == "refuse":
        for refused in (building(tmp_path / "out"), building(tmp_path / "out", overwrite=True)):
            with pytest.raises(ResumeError, match=r"1 finished block is in .*--resume.*--restart"), refused:
                pass
        with pytest.raises(ResumeError):
            refuse_unfinished_run(tmp_path / "out")
        assert finished_blocks(partial) == 1
        return
    refuse_unfinished_run(tmp_path / "out", leftover)
    with building(tmp_path / "out", leftover=leftover) as directory:
        assert (directory / "half").exists() == (leftover == "resume")
        assert (directory.parent == partial) == (leftover == "resume")
        with pytest.raises(OutputError, match=f"process {os.getpid()} is writing"):
            refuse_unfinished_run(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("out", ["out", "./out", "deep/out", "deep/../out"])
def test_an_output_may_be_relative_also_if_temporary_directories_are_absolute(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Since Python 3.12 `mkdtemp` returns an absolute path; here it does in every version.
    mkdtemp = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda *args, **kwargs: os.path.abspath(mkdtemp(*args, **kwargs)))
    monkeypatch.chdir(tmp_path)
    Path("deep").mkdir()
    _left(Path(out), 1)
    with building(Path(out), leftover="resume") as directory:
        assert (directory / "half").is_file()
    assert [path.name for path in Path(out).iterdir()] == ["half"]
    assert [path.name for path in Path(out).parent.iterdir() if path.name != "deep"] == ["out"]


def test_of_several_leftovers_the_one_with_most_blocks_is_continued(tmp_path: Path) -> None:
    partials = []
    for i, blocks in enumerate((1, 3, 2)):
        partials.append(_left(tmp_path / "out", blocks).rename(tmp_path / f".elsewhere{i}"))
    for i, partial in enumerate(partials):
        partial.rename(tmp_path / f".out.{i:08d}.partial")
    with building(tmp_path / "out", leftover="resume") as directory:
        assert directory.parent.name == ".out.00000001.partial"
        assert len(list(tmp_path.iterdir())) == 1


def test_what_is_left_of_an_export_that_has_its_name_is_no_finished_block(tmp_path: Path) -> None:
    """A process may be killed between the renaming and the removal of the journal."""
    partial = _left(tmp_path / "out", 2)
    (partial / "checkpoint").rename(tmp_path / "out")
    assert finished_blocks(partial) == 0
    with pytest.raises(OutputError, match="not empty"), building(tmp_path / "out"):
        pass
    assert not partial.exists()


def test_no_space_left_says_where_the_finished_blocks_are(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "No space left on device")
    built = building(tmp_path / "out")
    _write_half(built.__enter__(), 1)
    with pytest.raises(OutputError, match=r"no space left.*1 finished block is in"):
        built.__exit__(OSError, error, None)
