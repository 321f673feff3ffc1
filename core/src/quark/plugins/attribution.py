"""Attribution: errors in a plugin's code, and errors about its objects, name the plugin."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from quark.base.lazy import LazyRef
from quark.base.shortages import shortage
from quark.base.version import VERSION
from quark.errors import PluginError, QuarkError
from quark.plugins.catalog import catalog
from quark.plugins.discovery import CORE, Source
from quark.plugins.failures import leave_out
from quark.plugins.kinds import BUILT_IN

__all__ = ["Origin", "attributed", "origin"]

_MACHINE_ERRORS = (OSError, MemoryError)
"""Errors of the machine keep their type, so that code that handles them still recognizes them."""
_RAISE = dis.opmap["RAISE_VARARGS"]


@attrs.frozen
class Origin:
    """Something that a plugin brings.

    Attributes:
        what: Description for messages: ``"the algorithm 'gptq'"``.
        source: The plugin.
    """

    what: str
    source: Source

    @property
    def is_checked_whole(self) -> bool:
        """Whether each element of its results is checked: of other projects, and if plugins are strict."""
        return catalog().is_strict or self.source.distribution not in (CORE, *BUILT_IN)

    def __str__(self) -> str:
        return f"{self.what} of {self.source}"

    def error(self, complaint: str) -> PluginError:
        """Return the `PluginError` about it.

        Args:
            complaint: The predicate, such as ``"leaves NaN in the weight of 'lm_head'"``.
        """
        return PluginError(f"{self} {complaint}. It is broken: {leave_out(self.source)}")


def origin(kind: str, name: str) -> Origin:
    """Return where the record of that name comes from; raises as `quark.plugins.Registry.get` does.

    Args:
        kind: In the plural, such as ``"algorithms"``.
        name: Of the record.
    """
    registry = catalog().registries[kind]
    return Origin(f"the {registry.kind.name} '{registry.get(name).name}'", registry.source(name))


@contextmanager
def attributed(doing: str, whose: Origin | None = None) -> Iterator[None]:
    """Let errors that leave the body say whose code raised them.

    That is the plugin in whose package the innermost frame lies, or else ``whose``. An error that is none of
    quark's own becomes a `PluginError` with the original as its cause. Quark's own errors, which plugins
    raise on purpose, and errors of the machine keep their type and get a note. So does an error that code of
    the core has come upon, not raised, when a plugin called it: it is a bug of quark-core. Errors of nobody's
    plugin pass unchanged.

    Args:
        doing: Description of the work: ``"rounding 'model.layers.0.mlp.up_proj'"``.
        whose: The object that is called in the body, where it is known.

    Raises:
        PluginError: The body raised an error of another kind, in a plugin's code.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, PluginError):
            raise
        source, where, where_in_core = _raised_in(error)
        if source is None and whose is None:
            raise
        if whose is None:
            who = str(source)
        elif source in (None, whose.source):
            who = str(whose)
        else:
            who = f"{source}, called by {whose},"
        if isinstance(error, (QuarkError, *_MACHINE_ERRORS)) or shortage(error) is not None:
            note = f"raised by {who} while {doing}"
        elif where_in_core:
            note = f"raised by {CORE} {VERSION}{where_in_core}, called by {who}{where}, while {doing}: it is a bug of {CORE}"
        else:
            fix = leave_out(source or (whose.source if whose is not None else Source("")))
            original = f"{type(error).__name__}: {error}"
            raise PluginError(f"{who} raised {original}{where} while {doing}. {fix[:1].upper()}{fix[1:]}") from error
        if not getattr(error, "__notes__", None):
            error.add_note(note)
        raise


def _raised_in(error: Exception) -> tuple[Source | None, str, str]:
    """Return the plugin with the innermost frame of an error's traceback, and places in it and in the core.

    A place reads ``" (file, line n)"``.

    The second place is in the core, where its code has come upon the error when the plugin called it; else it
    is empty. An error that the core raises is a message to its caller, unless it is an assertion.
    """
    # Errors of the core are no plugin's.
    plugins = [source for source in catalog().sources() if source.module and source.distribution != CORE]
    packages = {source.module.partition(":")[0].partition(".")[0]: source for source in plugins}
    modules = dict(_modules_of_records())
    innermost: Source | None = None
    where = in_core = ""
    trace = error.__traceback__
    while trace is not None:
        code, module = trace.tb_frame.f_code, str(trace.tb_frame.f_globals.get("__name__", ""))
        place = f" ({code.co_filename}, line {trace.tb_lineno})"
        source = packages.get(module.partition(".")[0]) or modules.get(module)
        if source is not None:
            innermost, where, in_core = source, place, ""
        elif innermost is not None and module.partition(".")[0] == "quark":
            is_said = code.co_code[trace.tb_lasti] == _RAISE and not isinstance(error, AssertionError)
            in_core = "" if is_said else place
        trace = trace.tb_next
    return innermost, where, in_core


def _modules_of_records() -> Iterator[tuple[str, Source]]:
    """Yield modules that records point at, which is all that is known of run-time registrations."""
    for registry in catalog().registries.values():
        for claim in registry.claims():
            for field in attrs.fields(type(claim.record)):
                reference = getattr(claim.record, field.name)
                # A record may point at a class of the core, or of torch, which is nobody's plugin.
                if isinstance(reference, LazyRef) and reference.module.partition(".")[0] not in ("quark", "torch", "transformers"):
                    yield reference.module, claim.source
