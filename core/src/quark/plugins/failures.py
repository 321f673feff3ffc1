"""Failures of plugins.

quark records each failure and warns about it once. An error message shows the failure again if the failure
may be the cause of the error.
"""

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
    """Return the result of ``call``, which runs code of a plugin. If it raises, return ``failed(error)``.

    A KeyboardInterrupt is raised again. Other exceptions are caught even if they do not derive from
    Exception, because a plugin may call ``sys.exit``, or a Rust library of the plugin may panic.
    """
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return failed(error)


class PluginWarning(UserWarning):
    """A plugin, or a part of a plugin, is broken. quark continues without the broken part."""


@attrs.frozen
class PluginFailure:
    """One failure of one plugin.

    Attributes:
        source: The plugin that failed.
        stage: The stage at which the plugin failed, one of `STAGES`. ``"require"``: the plugin was written
            for another core. ``"import"``: the import of the module raised. ``"register"``: the name or the
            signature of a hook is wrong. ``"call"``: a hook raised. ``"validate"``: a hook returned objects
            that are not records, or a record is not valid.
        error: A sentence that describes the failure.
        fix: A phrase that says how to repair the plugin, or how to work without it.
        exception: The exception that caused the failure, or None if there was none.
    """

    source: Source
    stage: str = attrs.field(validator=attrs.validators.in_(STAGES))
    error: str
    fix: str
    exception: BaseException | None = attrs.field(default=None, eq=False, repr=False)

    def __str__(self) -> str:
        return f"{self.source} failed at stage '{self.stage}': {self.error}. Fix: {self.fix}"


def leave_out(source: Source, error: BaseException | None = None) -> str:
    """Return a phrase for messages that advises the user to update the plugin or to leave it out.

    Args:
        source: The plugin.
        error: Error that the plugin raised. If the plugin used a name or an argument that quark does not
            have, the advice also says where renamed names are listed.
    """
    if not source.distribution:
        return "correct it"
    of_quark = isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "quark"
    if of_quark or (isinstance(error, TypeError) and "unexpected keyword argument" in str(error)):
        return f"{leave_out(source)}; {RENAMED}"
    return f"update it (pip install --upgrade {source.distribution}), or leave it out (QUARK_DISABLED_PLUGINS={source.distribution})"


def warn_once(failures: Iterable[PluginFailure]) -> None:
    """Warn about each failure. A process calls this function once, after it has loaded all plugins."""
    for failure in failures:
        warnings.warn(str(failure), PluginWarning, stacklevel=2)


def warn_of_unstated(sources: Iterable[Source]) -> None:
    """Warn about plugins that state no version of the plugin API.

    If such a plugin was written for an older version, quark may silently ignore its hooks and fields that
    have been renamed since.
    """
    for source in sources:
        message = (
            f"{source} does not say which version of the plugin API it was written for. This quark-core has version {API_VERSION}. "
            "Parts of the plugin that use older names fail or are ignored. "
            f"Fix: adapt the plugin, then write QUARK_API = ({API_VERSION}, {API_VERSION}) in its module; {RENAMED}"
        )
        warnings.warn(message, PluginWarning, stacklevel=2)
