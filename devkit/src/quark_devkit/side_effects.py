"""Side effects of code: files, programs, network, pickles, and changes of state that all code shares.

This module must not import torch, because it also watches listings.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

from quark.plugins import collection, registry
from quark_devkit.process_state import changes, shared_state

__all__ = ["prints_reach_stdout", "side_effects"]

_PROGRAMS = ("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn", "subprocess.Popen")
_NETWORK = ("socket.bind", "socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")
_FILES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "shutil.rmtree")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC


@contextmanager
def side_effects() -> Iterator[list[str]]:
    """Yield a list to which the side effects of the body are added, as predicates such as
    ``"starts a program"``.

    Call this in a separate process, since Python never removes an audit hook.
    """
    effects: list[str] = []
    is_watching = True

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if is_watching and (effect := _effect_of(event, arguments)) is not None and effect not in effects:
            effects.append(effect)

    before = shared_state()
    sys.addaudithook(watch)
    try:
        yield effects
    finally:
        is_watching = False
        effects += [f"changes {name}" for name in changes(before, shared_state())]


@contextmanager
def prints_reach_stdout() -> Iterator[None]:
    """Make text that plugins print go to stdout.

    When the core loads a plugin, it redirects this text to stderr. Other programs that import the plugin do
    not.
    """

    def not_redirected(_: object) -> AbstractContextManager[None]:
        return nullcontext()

    with mock.patch.object(collection, "redirect_stdout", not_redirected), mock.patch.object(registry, "redirect_stdout", not_redirected):
        yield


def _effect_of(event: str, arguments: tuple[Any, ...]) -> str | None:
    """Return the audit event as a predicate; None if the event is harmless."""
    if event in _PROGRAMS:
        return "starts a program"
    if event in _NETWORK:
        return "uses the network"
    if event in ("os.putenv", "os.unsetenv"):
        return "changes environment variables"
    if event in _FILES:
        return f"changes files, such as '{arguments[0]}'"
    if event.endswith(".find_class"):
        return "unpickles"
    if event == "open" and isinstance(arguments[0], str) and arguments[0] != os.devnull:
        _, mode, flags = arguments
        writes = bool(set("wax+") & set(mode)) if isinstance(mode, str) else bool((flags or 0) & _WRITING)
        return f"writes the file '{arguments[0]}'" if writes else None
    return None
