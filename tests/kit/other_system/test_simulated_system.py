"""Under ``--system``, the repository's code meets the limits of another system, and libraries do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

EVERYWHERE = """
import os, sys
from pathlib import Path

def refused(errors, function, *arguments, **named):
    try:
        function(*arguments, **named)
    except errors:
        return
    raise AssertionError(f"{function} {arguments} was not refused")

def missing(module, *names):
    assert [name for name in names if hasattr(module, name)] == []

assert not Path("/proc/self/statm").exists()
refused(FileNotFoundError, open, "/proc/self/statm")
missing(os, "fdatasync", "posix_fadvise", "sched_getaffinity", "O_TMPFILE")
path = Path(sys.argv[1]) / "file"
import shutil, tempfile
assert hasattr(tempfile._os, "fork") and hasattr(shutil.os, "sched_getaffinity")
import json.decoder, importlib.util, os.path as paths
assert json.decoder and importlib.util.find_spec and paths.join("a", "b")
"""

WINDOWS = """
import ctypes, mmap, multiprocessing, signal

assert sys.platform == "win32"
for module in ("fcntl", "resource", "pwd", "termios"):
    refused(ImportError, exec, f"import {module}", {"__name__": "quark.x"})
    exec(f"import {module}", {"__name__": "torch.x", "__file__": tempfile.__file__})
missing(os, "fork", "pread", "pwrite", "geteuid", "O_NOFOLLOW", "O_DIRECTORY", "sysconf", "register_at_fork")
missing(signal, "SIGKILL", "SIGHUP")
missing(mmap, "MADV_DONTNEED", "MAP_PRIVATE")
refused(ImportError, exec, "from os import pread", {"__name__": "quark.x"})
refused(TypeError, ctypes.CDLL, None)
refused(ValueError, multiprocessing.get_context, "fork")
refused(PermissionError, os.open, path.parent, os.O_RDONLY)

file = os.open(path, os.O_WRONLY | os.O_CREAT)
assert os.write(file, b"a\\nb") == 3
os.close(file)
assert path.read_bytes() == b"a\\r\\nb"
file = os.open(path, os.O_WRONLY | os.O_BINARY)
os.write(file, b"a\\nb")
refused(PermissionError, path.unlink)
refused(PermissionError, path.rename, path.with_name("other"))
refused(PermissionError, os.replace, path, path.with_name("other"))
refused(PermissionError, shutil.rmtree, path.parent)
os.close(file)
assert path.read_bytes()[:3] == b"a\\nb"

with path.open("rb") as opened:
    mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
missing(mapped, "madvise")
refused(PermissionError, path.unlink)
refused(PermissionError, path.parent.rename, path.parent.with_name("elsewhere"))
mapped.close()

reading = os.open(path, os.O_RDONLY | os.O_BINARY)
refused(OSError, os.fsync, reading)
os.close(reading)
missing(path.stat(), "st_blocks")
assert path.stat().st_uid == 0
path.write_text("é\\n")
assert path.read_bytes() == b"\\xe9\\r\\n"
other = path.with_name("other")
other.write_bytes(b"")
refused(FileExistsError, path.rename, other)
path.replace(other)
path.mkdir()
refused(PermissionError, os.replace, other, path)
refused(OSError, path.with_name("link").symlink_to, other)
other.chmod(0o444)
refused(PermissionError, other.unlink)
for name in ("a:b", "what?", "NUL", "aux.txt", "ends.", "ends "):
    refused(OSError, path.with_name(name).mkdir)
    refused(OSError, path.with_name(name).write_bytes, b"")
    refused(OSError, other.rename, path.with_name(name))
with tempfile.TemporaryFile() as file:
    file.write(b"x")

import msvcrt
one, two = (os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_BINARY) for _ in range(2))
for number in (one, two):
    os.lseek(number, 100, os.SEEK_SET)
msvcrt.locking(one, msvcrt.LK_NBLCK, 1)
refused(PermissionError, msvcrt.locking, two, msvcrt.LK_NBLCK, 1)
os.close(one)
msvcrt.locking(two, msvcrt.LK_NBLCK, 1)
"""

MACOS = """
import ctypes, resource

assert sys.platform == "darwin"
missing(ctypes.CDLL(None), "renameat2", "malloc_trim")
assert hasattr(ctypes.CDLL(None), "malloc") and hasattr(os, "pread") and hasattr(os, "fork")
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 1 << 20
"""


@pytest.mark.parametrize(("system", "program"), [("windows", WINDOWS), ("macos", MACOS)])
def test_a_program_is_refused_what_the_system_does_not_offer(system: str, program: str, tmp_path: Path) -> None:
    environment = {**os.environ, "QUARK_OTHER_SYSTEM": system, "PYTHONPATH": str(HERE)}
    command = [sys.executable, "-c", EVERYWHERE + program, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


TEST = """
import os, subprocess, sys

def test_system():
    import quark.base.files
    assert quark.base.files.sys.platform == "win32" and not hasattr(os, "fork")
    subprocess.run([sys.executable, "-c", "import os; assert not hasattr(os, 'fork')"], check=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "1"])
def test_the_option_changes_the_system_of_the_tests_and_of_what_they_start(workers: str, tmp_path: Path) -> None:
    root = HERE.parents[2]
    (tmp_path / "test_system.py").write_text(TEST, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "--rootdir", str(root), "-c", "pyproject.toml"]
    environment = {name: value for name, value in os.environ.items() if name not in ("QUARK_OTHER_SYSTEM", "PYTHONPATH")}
    done = subprocess.run(
        [*command, "-n", workers, "--system", "windows", str(tmp_path / "test_system.py")],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
