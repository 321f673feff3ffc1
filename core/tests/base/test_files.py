"""Files: each function does what its docstring says, by every implementation for an operating system."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import pytest

from quark.base import files


def opened(path: Path) -> int:
    return files.open_file(path, os.O_RDWR | os.O_CREAT, 0o644)


def test_bytes_are_written_and_read_at_a_position_as_they_are(tmp_path: Path) -> None:
    file = opened(tmp_path / "file")
    files.write_at(file, memoryview(b"one\ntwo\x1a\r\n"), 2)
    assert files.pwrite(file, b"\n\n", 0) == 2
    assert files.pread(file, 100, 1) == b"\none\ntwo\x1a\r\n"
    assert files.pread(file, 100, 50) == b""
    files.sync_data(file)
    os.close(file)
    assert (tmp_path / "file").read_bytes() == b"\n\none\ntwo\x1a\r\n"


def test_threads_that_write_to_one_file_write_to_their_own_positions(tmp_path: Path) -> None:
    file = opened(tmp_path / "file")

    def write(i: int) -> None:
        for k in range(200):
            files.write_at(file, memoryview(bytes([i]) * 3), 3 * (i + 8 * k))

    threads = [Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(file)
    assert (tmp_path / "file").read_bytes() == b"".join(bytes([i]) * 3 for i in range(8)) * 200


LOCKING = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from quark.base import files
file = files.open_own(Path(sys.argv[1]))
print(files.try_lock(file), files.pread(file, 100, 0).decode(), flush=True)
sys.stdin.read()
"""


def test_a_lock_is_held_until_the_file_is_closed_or_the_process_is_killed_and_others_can_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"owner")
    file = opened(path)
    assert files.try_lock(file)
    command = [sys.executable, "-c", LOCKING, str(path)]
    done = subprocess.run(command, input="", stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    assert done.stdout == "False owner\n"
    os.close(file)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True owner\n"
        file = opened(path)
        assert not files.try_lock(file)
        process.kill()
        process.wait(60)
        assert files.try_lock(file)
        os.close(file)


def test_a_file_that_is_missing_or_a_link_is_not_ones_own(tmp_path: Path) -> None:
    assert files.open_own(tmp_path / "file") is None
    (tmp_path / "file").touch()
    file = files.open_own(tmp_path / "file")
    assert file is not None
    os.close(file)


@pytest.mark.posix("links are allowed to few users of Windows")
def test_a_link_is_not_ones_own_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert files.open_own(tmp_path / "link") is None


@pytest.mark.posix("links are allowed to few users of Windows")
@pytest.mark.parametrize(
    ("directory", "is_cache"),
    [
        ("models--acme--tiny/snapshots/0123", True),
        ("models--acme--tiny/snapshots/0123/1_Pooling", True),
        ("models--acme--tiny/snapshots/0123/snapshots/mine", True),
        ("snapshots/0123", False),
        ("snapshots", False),
        ("backups/snapshots/2026/tiny", False),
        ("models--acme--tiny/0123", False),
        ("models--acme--tiny/mine/snapshots/0123", False),
        ("datasets/models--acme--tiny/old snapshots/0123", False),
    ],
)
def test_links_are_followed_into_the_store_of_a_cache_of_models_alone(directory: str, is_cache: bool, tmp_path: Path) -> None:
    folder = tmp_path / directory
    folder.mkdir(parents=True)
    for parent in (folder, *folder.parents[: len(Path(directory).parts)]):
        (parent / "blobs").mkdir(exist_ok=True)
        (parent / "blobs" / "secret").write_text("x")
    outside = [parent / "blobs" for parent in folder.parents[: len(Path(directory).parts)]]
    stores = []
    for number, place in enumerate(outside):
        (folder / f"{number}.json").symlink_to(place / "secret")
        if not files.leads_out(folder / f"{number}.json", folder):
            stores.append(place)
    assert stores == ([tmp_path / "models--acme--tiny" / "blobs"] if is_cache else [])
    (folder / "inside.json").symlink_to("blobs/secret")
    assert not files.leads_out(folder / "inside.json", folder)


@pytest.mark.posix("links are allowed to few users of Windows")
def test_a_store_that_is_a_link_is_no_store(tmp_path: Path) -> None:
    folder, private = tmp_path / "models--acme--tiny/snapshots/0123", tmp_path / "private"
    for made in (folder, private):
        made.mkdir(parents=True)
    (private / "secret").write_text("x")
    (tmp_path / "models--acme--tiny/blobs").symlink_to(private)
    (folder / "config.json").symlink_to("../../blobs/secret")
    assert files.leads_out(folder / "config.json", folder)


def test_files_and_directories_are_synchronized(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    files.sync(tmp_path / "file")
    (tmp_path / "file").chmod(0o444)
    files.sync(tmp_path / "file")
    files.sync(tmp_path)
    with pytest.raises(FileNotFoundError):
        files.sync(tmp_path / "missing")
    (tmp_path / "file").chmod(0o644)


def test_a_hole_in_a_file_is_no_allocated_memory_if_the_system_tells(tmp_path: Path) -> None:
    (tmp_path / "full").write_bytes(b"x" * 10_000)
    assert files.allocated_bytes(tmp_path / "full") >= 10_000
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(1 << 24)
    assert files.allocated_bytes(tmp_path / "hole") in (0, 1 << 24)


def test_a_file_has_a_second_name_or_stands_for_another(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    files.represent(path, tmp_path / "standing")
    assert (tmp_path / "standing").read_bytes() == b"x"
    files.link_or_copy(path, tmp_path / "second")
    path.unlink()
    assert (tmp_path / "second").read_bytes() == b"x"


def test_a_file_is_copied_where_it_cannot_be_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError("this file system has no links")

    for name in ("link", "symlink"):
        monkeypatch.setattr(os, name, refused)
    (tmp_path / "file").write_bytes(b"x")
    files.represent(tmp_path / "file", tmp_path / "copy")
    (tmp_path / "file").write_bytes(b"y")
    assert (tmp_path / "copy").read_bytes() == b"x"


def test_an_empty_directory_gives_way_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "file").touch()
    (tmp_path / "empty").mkdir()
    files.move_directory(tmp_path / "new", tmp_path / "empty")
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["file"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    with pytest.raises(OSError, match="full"):
        files.move_directory(tmp_path / "empty", tmp_path / "full")
    assert (tmp_path / "full" / "precious").exists()


def test_directories_are_exchanged_or_stay(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    is_exchanged = files.exchange(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "one" / ("other" if is_exchanged else "one")).exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux exchanges")
def test_directories_that_are_not_there_are_not_exchanged(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    with pytest.raises(FileNotFoundError, match="another"):
        files.exchange(tmp_path / "one", tmp_path / "another")


def test_what_is_released_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10_000)
    with (tmp_path / "file").open("r+b") as file:
        files.release_cached(file.fileno(), 10_000)
        memory = mmap.mmap(file.fileno(), 10_000)
        assert memory[:1] == b"x"
        files.release_pages(memory)
        assert memory[:1] == b"x"
        memory.close()


def test_a_text_is_replaced_in_one_step_by_any_thread_and_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, killed = tmp_path / "report.json", []
    path.write_text("earlier")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # a process that is killed removes nothing
        patch.setattr(Path, "replace", lambda *_: killed.append(True) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            files.replace_text(path, "half")
    assert killed
    assert path.read_text() == "earlier"
    assert len(list(tmp_path.iterdir())) == 2
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: files.replace_text(path, f"{number}" * 10_000), range(8)))
    files.replace_text(path, "last")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["last"]
