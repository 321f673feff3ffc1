"""Functions that name a plugin in errors that its code raised, and in errors about objects that it
provides."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
from greenlet import GreenletExit

from quark.base.lazy import LazyRef
from quark.base.shortages import shortage
from quark.base.version import VERSION
from quark.errors import PluginError, QuarkError
from quark.plugins.catalog import catalog
from quark.plugins.discovery import CORE, Source
from quark.plugins.failures import leave_out
from quark.plugins.registries import BUILT_IN

_MACHINE_ERRORS = (OSError, MemoryError)
"""Errors of the machine, such as a full disk. They keep their type, because callers catch them by type."""
_REFUSALS = (LookupError, TypeError, ValueError)
"""Errors by which the core refuses a caller's input; any other error is a bug of the core."""
_ENDINGS = (KeyboardInterrupt, GeneratorExit, GreenletExit)
"""Exceptions that end a program, a generator or a calibration forward pass. They are no fault of a plugin."""


@attrs.frozen
class Origin:
    """Something that a plugin provides, such as an algorithm.

    Attributes:
        what: A description for messages, such as ``"the algorithm 'gptq'"``.
        source: The plugin that provides this object.
    """

    what: str
    source: Source

    @property
    def is_checked_whole(self) -> bool:
        """Whether quark checks every element of the object's results.

        quark checks every element for third-party plugins, and for all plugins in strict mode.
        """
        return catalog().is_strict or self.source.distribution not in (CORE, *BUILT_IN)

    def __str__(self) -> str:
        return f"{self.what} of {self.source}"

    def error(self, complaint: str) -> PluginError:
        """Return a `PluginError` that names this object and the plugin that provides it.

        Args:
            complaint: A verb phrase, such as ``"leaves NaN in the weight of 'lm_head'"``.
        """
        return PluginError(f"{self} {complaint}. It is broken: {leave_out(self.source)}")


def origin(kind: str, name: str) -> Origin:
    """Return the origin of the record ``name``. Raise the same errors as `quark.plugins.Registry.get`.

    Args:
        kind: Kind of the record in the plural, such as ``"algorithms"``.
        name: Name of the record.
    """
    registry = catalog().registries[kind]
    return Origin(f"the {registry.kind.name} '{registry.get(name).name}'", registry.source(name))


@contextmanager
def attributed(doing: str, whose: Origin | None = None) -> Iterator[None]:
    """Make errors in the body of the ``with`` statement name the plugin whose code raised them.

    The error belongs to the plugin with the innermost frame in the traceback. If no frame belongs to a
    plugin, the error belongs to the plugin of ``whose``. It becomes the cause of a `PluginError`. Two kinds
    of errors keep their type and get a note that names the plugin: the classes of `quark.errors`, which
    plugins raise on purpose, and errors of the machine.

    If a plugin called the core and the core raised, the error keeps its type, and a note says that it is a
    bug of quark-core. ValueError, TypeError and LookupError are not treated as bugs of the core, because the
    core raises them for bad arguments. They count as errors of the plugin. Errors outside plugins are not
    changed. A KeyboardInterrupt is not changed either, nor is a SystemExit that no plugin raised, for example
    after SIGTERM.

    Args:
        doing: Description of the work, such as ``"rounding 'model.layers.0.mlp.up_proj'"``.
        whose: The object that the body calls, or None if the object is unknown.

    Raises:
        PluginError: The code of a plugin raised an error that does not keep its type.
    """
    try:
        yield
    except (PluginError, *_ENDINGS):
        raise
    except BaseException as error:
        source, where, where_in_core, is_below = _raised_in(error)
        if (source is None and whose is None) or (isinstance(error, SystemExit) and (source is None or is_below)):
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


def _raised_in(error: BaseException) -> tuple[Source | None, str, str, bool]:
    """Return which plugin's code raised an error, and where.

    Returns:
        Four values. The first is the plugin with the innermost frame of the error's traceback, or None if no
        frame belongs to a plugin. The second is the place in the plugin, ``" (file, line n)"``. The third is
        the place in the core if the plugin called the core and the core raised, and an empty string
        otherwise. The fourth is True if the frame that raised the error belongs to no plugin.
    """
    # Errors of the core belong to no plugin.
    plugins = [source for source in catalog().sources() if source.module and source.distribution != CORE]
    packages = {source.module.partition(":")[0].partition(".")[0]: source for source in plugins}
    modules = dict(_modules_of_records())
    innermost: Source | None = None
    where = in_core = ""
    is_below = False
    for frame, line in traceback.walk_tb(error.__traceback__):
        module, place = str(frame.f_globals.get("__name__", "")), f" ({frame.f_code.co_filename}, line {line})"
        package = module.partition(".")[0]
        source = packages.get(package) or modules.get(module)
        is_below = source is None
        if source is not None:
            innermost, where, in_core = source, place, ""
        elif innermost is not None and package == "quark" and not isinstance(error, _REFUSALS):
            in_core = place
    return innermost, where, in_core, is_below


def _modules_of_records() -> Iterator[tuple[str, Source]]:
    """Yield the names of modules to which records refer, each with the source of the record.

    For a record that was registered at run time, this is the only way to find its source from a module.
    """
    for registry in catalog().registries.values():
        for claim in registry.claims():
            for field in attrs.fields(type(claim.record)):
                reference = getattr(claim.record, field.name)
                # A record may point at a class of the core or of torch, which belongs to no plugin.
                if isinstance(reference, LazyRef) and reference.module.partition(".")[0] not in ("quark", "torch", "transformers"):
                    yield reference.module, claim.source
