"""Simulate another operating system on Linux for code of this repository: names that Windows or macOS lacks, calls that it refuses.

The simulation depends on the caller. Modules of the repository, its tests and files that tests write import
stand-ins for ``os``, ``sys`` and a few other modules, and cannot import modules that the system lacks. If the
repository calls Python's functions that change files, directly or through ``pathlib``, ``shutil`` or
``tempfile``, they refuse whatever the system refuses. All other callers, such as torch, transformers and
pytest, see Linux, since their builds are for Linux.

Both simulations have missing functions, constants and modules, ``sys.platform``, and no ``/proc``.
`simulated_windows` and `simulated_macos` say what each adds. Not simulated are the file system's own rules
(``\\``, drives, upper and lower case, permissions), files that other processes hold open, ``os.name`` and
``platform``, libraries' behaviour on the system, and speed. psutil reads Linux's memory.
"""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
_LIBRARIES = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")} | {str(HERE), sys.prefix + "/bin"})
_OURS = {"acme_quant", "amd_quark_scripts", "quark"}
_installed: list[str] = []


def install(system: str) -> None:
    """Simulate a system, ``"windows"`` or ``"macos"``, for the repository's code; call this before any import of that code.

    The simulation lasts until the process ends.
    """
    if not _installed:
        early = [name for name in sys.modules if name.startswith("quark.")]
        assert not early, f"{early[0]} has been imported and knows the real system"
        from importlib import import_module

        import_module(f"simulated_{system}").install()
        _installed.append(system)
    assert _installed == [system]


def installed() -> str | None:
    """Return the system that is simulated, if any."""
    return _installed[0] if _installed else None


@functools.cache
def _is_of_the_repository(name: str, file: str | None) -> bool:
    top = name.partition(".")[0]
    if top in _OURS or top.startswith("quark_"):
        return True
    if file is None:  # python -c, but not a worker of pytest-xdist, which also starts this way
        return name == "__main__" and not any("execnet" in text or "exec(eval" in text for text in sys.orig_argv)
    return not file.startswith((*_LIBRARIES, "<")) and not any(part in file for part in ("/site-packages/", "/dist-packages/"))


def is_ours(scope: Mapping[str, Any]) -> bool:
    """Return whether globals belong to a module of the repository, to a test, or to a file that a test writes."""
    return _is_of_the_repository(str(scope.get("__name__", "")), scope.get("__file__"))


_BETWEEN = set(sys.stdlib_module_names) - {"__main__"} | {"simulated_system", "simulated_windows", "simulated_macos"}


def asked_by_us() -> bool:
    """Return whether the current call comes from the repository, directly or through Python's library."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        scope = frame.f_globals
        if str(scope.get("__name__", "")).partition(".")[0] not in _BETWEEN:
            return is_ours(scope)
        frame = frame.f_back
    return False


class StandIn(ModuleType):
    """A module as another system has it: without some names, with some names of its own, and else like the real module.

    Args:
        real: The real module.
        missing: Names that the stand-in lacks.
        own: Values by name that replace the real module's, or are new.
    """

    def __init__(self, real: ModuleType, missing: Iterable[str] = (), own: Mapping[str, Any] | None = None) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(_real=real, _missing=frozenset(missing), _before={}, **(own or {}))

    def __getattr__(self, name: str) -> Any:
        if name in self._missing:
            raise AttributeError(f"module '{self._real.__name__}' has no attribute '{name}' on this system")
        return getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            self._before.setdefault(name, getattr(self._real, name))
            setattr(self._real, name, value)

    def __delattr__(self, name: str) -> None:
        """Restore the real value: pytest's monkeypatch deletes names that `__getattr__` provided."""
        setattr(self._real, name, self._before.pop(name))

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._real), *self.__dict__} - self._missing)


def import_as(stand_ins: Mapping[str, ModuleType], missing: Iterable[str]) -> None:
    """Let the repository import stand-ins, and fail to import missing modules."""
    plain, missing = builtins.__import__, frozenset(missing)

    def imported(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        module = name if fromlist else name.partition(".")[0]  # the statement binds this module
        if level or (module not in stand_ins and module not in missing) or globals is None or not is_ours(globals):
            return plain(name, globals, locals, fromlist, level)
        if module in missing:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        if name != module:
            plain(name, globals, locals, fromlist, level)
        return stand_ins[module]

    builtins.__import__ = imported


def replace(module: ModuleType, name: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function of Python's library by ``wrapped(function)``."""
    plain = getattr(module, name)
    setattr(module, name, functools.wraps(plain)(wrapped(plain)))


def refuse_proc() -> None:
    """Hide all files below ``/proc``."""

    def absent(plain: Callable[..., Any]) -> Callable[..., Any]:
        def function(path: Any, *rest: Any, **named: Any) -> Any:
            if isinstance(path, str | os.PathLike) and os.fspath(path).startswith("/proc") and asked_by_us():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
            return plain(path, *rest, **named)

        return function

    for name in ("stat", "lstat", "open", "readlink", "listdir", "scandir"):
        replace(os, name, absent)
    replace(io, "open", absent)
    builtins.open = io.open
