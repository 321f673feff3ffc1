"""Failures of plugins: each is recorded, warned of once, and shown in every error that it may explain."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import TypeVar

import attrs

from quark.plugins.api_version import API_VERSION, RENAMED
from quark.plugins.discovery import Source

T = TypeVar("T")
STAGES = ("require", "import", "register", "call", "validate")


def attempted(call: Callable[[], T], failed: Callable[[BaseException], T]) -> T:
    """Return the result of a plugin's code, or ``failed(error)`` if it raises anything but KeyboardInterrupt.

    A plugin may raise a BaseException that is not an Exception: it exits, or its Rust library panics.
    """
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return failed(error)


class PluginWarning(UserWarning):
    """A plugin is broken, in part or in whole; everything else works without it."""


@attrs.frozen
class PluginFailure:
    """One failure of one plugin.

    Attributes:
        source: The plugin.
        stage: Where it failed, one of `STAGES`: ``require`` (made for another core), ``import`` (its module),
            ``register`` (names and signatures of its hooks), ``call`` (a hook raised) or ``validate`` (a
            record or result of a hook).
        error: Description, as a sentence.
        fix: How to repair it.
        exception: The exception that caused it, if there is one.
    """

    source: Source
    stage: str = attrs.field(validator=attrs.validators.in_(STAGES))
    error: str
    fix: str
    exception: BaseException | None = attrs.field(default=None, eq=False, repr=False)

    def __str__(self) -> str:
        return f"{self.source} failed at stage '{self.stage}': {self.error}. Fix: {self.fix}"


def leave_out(source: Source, error: BaseException | None = None) -> str:
    """Return the fix that always helps: update the plugin, or leave it out.

    Args:
        source: The plugin.
        error: Error that it raised. If the plugin asked quark for an unknown name or argument, the fix says
            where renamed ones are listed.
    """
    if not source.distribution:
        return "correct it"
    of_quark = isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "quark"
    if of_quark or (isinstance(error, TypeError) and "unexpected keyword argument" in str(error)):
        return f"{leave_out(source)}; {RENAMED}"
    return f"update it (pip install --upgrade {source.distribution}), or leave it out (QUARK_DISABLED_PLUGINS={source.distribution})"


def warn_once(failures: Iterable[PluginFailure]) -> None:
    """Warn of each failure; called once for a set of plugins, when all of them are in place."""
    for failure in failures:
        warnings.warn(str(failure), PluginWarning, stacklevel=2)


def warn_of_unstated(sources: Iterable[Source]) -> None:
    """Warn of plugins that state no version of the plugin API: quark may silently ignore renamed things."""
    for source in sources:
        message = (
            f"{source} does not say which version of the plugin API it was written for, and this quark-core has version {API_VERSION}: "
            "its parts under older names fail or are ignored. "
            f"Fix: write QUARK_API = ({API_VERSION}, {API_VERSION}) in its module once it fits; {RENAMED}"
        )
        warnings.warn(message, PluginWarning, stacklevel=2)
