"""What is installed runs on Linux, macOS and Windows: two modules ask for the system, and all files are opened as everywhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.kit.other_system.missing_names import C_OF_LINUX, MODULES_OF_POSIX, OS_OF_POSIX, SIGNALS_OF_POSIX

from .test_house_rules import ROOT, SOURCES, named

FILES = [*SOURCES, *sorted((ROOT / "examples").rglob("src/**/*.py"))]
OWNERS = {"core/src/quark/base/files.py", "core/src/quark/base/machine.py"}
EXCEPTIONS = {
    ("core/src/quark/base/parallel.py", "register_at_fork"): "threads that a fork does not have: asked for, since Windows has no forks",
    ("devkit/src/quark_devkit/fresh_process.py", "forkserver"): "asked for, and processes begin by themselves elsewhere",
    ("devkit/src/quark_devkit/checks/layout/stored_files.py", "resource"): "a check that needs it is left out on Windows",
    ("devkit/src/quark_devkit/checks/layout/stored_files.py", "O_DIRECTORY"): "nothing, if the system has no such flag",
    ("devkit/src/quark_devkit/checks/layout/stored_files.py", "os.open"): "the very function that fails on purpose, whoever calls it",
    ("devkit/src/quark_devkit/laws.py", "/proc/self/fd"): "open files are found where the system lists them",
    ("core/src/quark/models/hf/internals.py", "pread"): "a backend of safetensors, on every system",
    ("core/src/quark/models/hf/shards.py", "pread"): "a backend of safetensors, on every system",
    ("workbench/src/quark_workbench/report/contents.py", "platform.system"): "a fact in the report; nothing depends on it",
}
"""File and name, and the reason why it may be there."""
ASKED = {"sys.platform", "os.name", "platform.system"}
OF_FILES = {"st_blocks", "madvise", "posix_fadvise", "symlink_to", "hardlink_to", "fsync", "CDLL", "fork", "forkserver", "locking"}
NAMES = OS_OF_POSIX | OF_FILES | C_OF_LINUX | SIGNALS_OF_POSIX
OF_OS = {*OS_OF_POSIX, "link", "symlink", "fsync", "open", "umask"}


def of_the_system(source: str) -> Iterator[str]:
    """Yield what differs between systems, by the names that a source uses."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name in MODULES_OF_POSIX | {"msvcrt"})
            case ast.ImportFrom(module=str(module), names=names):
                yield from [module] if module in MODULES_OF_POSIX | {"msvcrt"} else []
                if module in ("os", "signal", "sys", "platform"):
                    yield from of_the_system("\n".join(f"{module}.{alias.name}" for alias in names))
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                if owner == "os" and name in OF_OS:
                    yield f"os.{name}" if name == "open" else name
                elif (owner == "signal" and name in SIGNALS_OF_POSIX) or name in OF_FILES | C_OF_LINUX:
                    yield name
                elif f"{owner}.{name}" in ASKED:
                    yield f"{owner}.{name}"
            case ast.Attribute(attr=name) if name in OF_FILES | C_OF_LINUX:
                yield name
            case ast.Constant(value=str(text)) if text.startswith("/proc/") or text in NAMES:
                yield text


def of_the_locale(source: str) -> Iterator[str]:
    """Yield calls that read or write text as each system would: without an encoding, or with ends of lines of its own."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
        options = {keyword.arg for keyword in node.keywords}
        modes = [a.value for a in [*node.args[:2], *(k.value for k in node.keywords if k.arg == "mode")] if isinstance(a, ast.Constant)]
        mode = next((m for m in modes if isinstance(m, str) and m and set(m) <= set("rwaxbt+")), "r")
        # Of a distribution's metadata, read_text has the name of a file.
        is_metadata = name == "read_text" and bool(node.args)
        is_open = (name == "open" and ast.unparse(node.func) in ("open", "io.open")) or (name == "open" and mode != "r")
        writes = name == "write_text" or (is_open and "b" not in mode and any(letter in mode for letter in "wax+"))
        reads = (name == "read_text" and not is_metadata) or (is_open and "b" not in mode)
        if (writes or reads) and "encoding" not in options:
            yield f"{node.lineno}: {name} without encoding"
        if writes and "newline" not in options:
            yield f"{node.lineno}: {name} without newline"


def test_what_differs_between_systems_is_asked_for_in_two_modules() -> None:
    used = {(named(path), name) for path in FILES for name in of_the_system(path.read_text(encoding="utf-8"))}
    used = {(file, name) for file, name in used if file not in OWNERS}
    assert used - EXCEPTIONS.keys() == set(), "ask quark.base.files or quark.base.machine, or give the reason in EXCEPTIONS"
    assert EXCEPTIONS.keys() - used == set()


def test_text_is_read_and_written_alike_on_all_systems() -> None:
    found = [f"{named(path)}:{call}" for path in FILES for call in of_the_locale(path.read_text(encoding="utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import fcntl", ["fcntl"]),
        ("from resource import getrusage", ["resource"]),
        ("from os import pread, getpid", ["pread"]),
        ("os.open(path, os.O_RDONLY | os.O_NOFOLLOW)", ["os.open", "O_NOFOLLOW"]),
        ("hasattr(os, 'posix_fadvise')", ["posix_fadvise"]),
        ("path.stat().st_blocks", ["st_blocks"]),
        ("if sys.platform == 'win32': pass", ["sys.platform"]),
        ("Path('/proc/self/statm')", ["/proc/self/statm"]),
        ("signal.SIGKILL, signal.SIGTERM", ["SIGKILL"]),
        ("get_context('forkserver')", ["forkserver"]),
        ("os.fspath(path), os.O_RDONLY, os.close(file), path.open()", []),
    ],
)
def test_of_the_system_finds(source: str, expected: list[str]) -> None:
    assert sorted(of_the_system(source)) == sorted(expected)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("path.read_text()", 1),
        ("path.write_text(text, encoding='utf-8')", 1),
        ("path.write_text(text)", 2),
        ("path.write_text(text, encoding='utf-8', newline='\\n')", 0),
        ("open(path)", 1),
        ("path.open('w', encoding='utf-8')", 1),
        ("path.open('rb'), open(path, mode='wb'), webbrowser.open(url), distribution.read_text('RECORD')", 0),
    ],
)
def test_of_the_locale_finds(source: str, count: int) -> None:
    assert len(list(of_the_locale(source))) == count
