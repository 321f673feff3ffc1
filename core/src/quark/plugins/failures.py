"""Failures of plugins: each is recorded, warned about once, and shown by every error that it may explain."""

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
    """Return what a plugin's code gives, or ``failed(error)`` if it raises anything but KeyboardInterrupt.

    Code of a plugin may raise what is no Exception: it exits, or is a library in Rust that panics.
    """
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return failed(error)


class PluginWarning(UserWarning):
    """A plugin is broken, in part or in whole; everything else goes on without it."""


@attrs.frozen
class PluginFailure:
    """One failure of one plugin.

    Attributes:
        source: Which plugin.
        stage: Where it failed, one of `STAGES`. ``require``: it was made for another core; ``import``: its
            module; ``register``: its hooks' names and signatures; ``call``: a hook of it raised;
            ``validate``: a record or result of a hook.
        error: Description in a sentence.
        fix: Way to mend it.
        exception: The exception behind it, if there is one.
    """

    source: Source
    stage: str = attrs.field(validator=attrs.validators.in_(STAGES))
    error: str
    fix: str
    exception: BaseException | None = attrs.field(default=None, eq=False, repr=False)

    def __str__(self) -> str:
        return f"{self.source} failed at stage '{self.stage}': {self.error}. Fix: {self.fix}"


def leave_out(source: Source, error: BaseException | None = None) -> str:
    """Return the fix that always helps: update the plugin, or do without it.

    Args:
        source: The plugin.
        error: Error that it raised. Where it asks quark for a name or an argument that does not exist, the
            fix says where renamed ones are listed.
    """
    if not source.distribution:
        return "correct it"
    of_quark = isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "quark"
    if of_quark or (isinstance(error, TypeError) and "unexpected keyword argument" in str(error)):
        return f"{leave_out(source)}; {RENAMED}"
    return f"update it (pip install --upgrade {source.distribution}), or leave it out (QUARK_DISABLED_PLUGINS={source.distribution})"


def warn_once(failures: Iterable[PluginFailure]) -> None:
    """Warn about each failure; called once for a set of plugins, after all of it is in place."""
    for failure in failures:
        warnings.warn(str(failure), PluginWarning, stacklevel=2)


def warn_of_unstated(sources: Iterable[Source]) -> None:
    """Warn of plugins that state no version of the plugin API: renamed things may be passed over silently."""
    for source in sources:
        message = (
            f"{source} does not say for which version of the plugin API it was written, and this quark-core has version {API_VERSION}: "
            "what it has under an older name fails or is passed over. "
            f"Fix: write QUARK_API = ({API_VERSION}, {API_VERSION}) in its module once it fits; {RENAMED}"
        )
        warnings.warn(message, PluginWarning, stacklevel=2)
