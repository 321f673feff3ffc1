"""Registry: the records of one kind by name, with their sources, conflicts and errors that say what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from quark.errors import AmbiguousNameError, MissingPluginError, UnknownNameError
from quark.lazy import LazyRef
from quark.names import closest
from quark.plugins.collection import Registration
from quark.plugins.discovery import normalized
from quark.plugins.records import Record
from quark.plugins.sources import PluginFailure, Source

R = TypeVar("R", bound=Record)

BUILT_IN = {
    "formats": "quark-schemes",
    "observers": "quark-schemes",
    "schemes": "quark-schemes",
    "algorithms": "quark-algos",
    "templates": "quark-templates",
    "exporters": "quark-exporters",
}
"""Which distribution of this project brings the built-in records of a kind."""

RUNTIME = Source("(this program)", "-", "registered at run time", "-")


class Registry(Generic[R]):
    """The records of one kind. A name claimed twice fails when it is asked for, never before.

    Args:
        kind: Such as ``"schemes"``.
        registrations: What plugins registered.
        failures: What went wrong with plugins, shown where a name is not found.
    """

    def __init__(self, kind: str, registrations: Iterable[Registration], failures: Iterable[PluginFailure] = ()) -> None:
        self.kind = kind
        self._failures = list(failures)
        self._claims: dict[str, list[Registration]] = {}
        for registration in registrations:
            self._claim(registration)

    def _claim(self, registration: Registration) -> None:
        for name in (registration.record.name, *registration.record.aliases):
            self._claims.setdefault(name, []).append(registration)

    def names(self) -> list[str]:
        """All names, sorted, without aliases; conflicting ones too."""
        return sorted({r.record.name for claims in self._claims.values() for r in claims})

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(self._candidates(name))

    def __iter__(self) -> Iterator[R]:
        """The records that have no conflict, by name."""
        return (self.get(name) for name in self.names() if len(_winners(self._claims[name])) == 1)

    def get(self, name: str) -> R:
        """The record of that name, alias, or ``distribution:name``.

        Raises:
            UnknownNameError: There is none.
            AmbiguousNameError: Several distributions claim it.
        """
        return self._find(name).record  # type: ignore[return-value]

    def source(self, name: str) -> Source:
        """Where the record of that name comes from; raises as `get`."""
        return self._find(name).source

    def load(self, name: str, field: str) -> Any:
        """The object that a field of the record points to.

        Raises:
            UnknownNameError, AmbiguousNameError: As `get`.
            MissingPluginError: The distribution's code cannot be imported.
        """
        found = self._find(name)
        reference: LazyRef | None = getattr(found.record, field)
        if reference is None:
            raise UnknownNameError(
                f"the {self._singular} '{name}' of {found.source} has no {field}", kind=self.kind, name=name, known=self.names()
            )
        try:
            return reference.load()
        except (ImportError, AttributeError) as error:
            raise MissingPluginError(
                f"the {self._singular} '{name}' of {found.source} points to '{reference}', which cannot be loaded: {error}. "
                f"Reinstall or upgrade {found.source.distribution}"
            ) from error

    def conflicts(self) -> dict[str, list[Source]]:
        """Names that several distributions claim, with the claimants."""
        return {name: [r.source for r in _winners(claims)] for name, claims in sorted(self._claims.items()) if len(_winners(claims)) > 1}

    def failures(self) -> list[PluginFailure]:
        """What went wrong with plugins while records were collected."""
        return list(self._failures)

    def register(self, record: R, source: Source = RUNTIME) -> None:
        """Add a record at run time; raises ValueError if its name is taken."""
        for name in (record.name, *record.aliases):
            if name in self:
                raise ValueError(f"the {self._singular} '{name}' is already registered by {self.source(name)}, please use a different name")
        self._claim(Registration(record, source))

    def unregister(self, name: str) -> None:
        """Take away a record that was added at run time; raises ValueError for one that a plugin brought."""
        found = self._find(name)
        if found.source != RUNTIME:
            raise ValueError(f"the {self._singular} '{name}' comes from {found.source} and cannot be unregistered")
        for key in (found.record.name, *found.record.aliases):
            self._claims[key] = [r for r in self._claims[key] if r is not found]
            if not self._claims[key]:
                del self._claims[key]

    @property
    def _singular(self) -> str:
        return self.kind.removesuffix("s")

    def _candidates(self, name: str) -> list[Registration]:
        distribution, separator, short = name.rpartition(":")
        if not separator:
            return _winners(self._claims.get(name, []))
        return [r for r in self._claims.get(short, []) if normalized(r.source.distribution) == normalized(distribution)]

    def _find(self, name: str) -> Registration:
        found = self._candidates(name) if isinstance(name, str) else []
        if not found:
            raise UnknownNameError(self._unknown(name), kind=self.kind, name=str(name), known=self.names())
        if len(found) > 1:
            claims = " and ".join(str(r.source) for r in found)
            choices = " or ".join(f"'{normalized(r.source.distribution)}:{name}'" for r in found)
            raise AmbiguousNameError(
                f"the {self._singular} '{name}' is claimed by {claims}. Ask for {choices}; or one of them sets replaces= to the other's name"
            )
        return found[0]

    def _unknown(self, name: str) -> str:
        known = self.names()
        parts = [f"there is no {self._singular} '{name}'"]
        if (guess := closest(str(name), [*known, *self._claims])) is not None:
            parts.append(f"Did you mean '{guess}'?")
        parts.append(f"Registered: {', '.join(known)}." if known else f"No {self.kind} are registered: pip install {BUILT_IN[self.kind]}.")
        if self._failures:
            parts.append("Plugins that failed: " + "; ".join(map(str, self._failures)))
        return f"{parts[0]}. {' '.join(parts[1:])}"


def _winners(claims: list[Registration]) -> list[Registration]:
    """The claims that stand: those whose distribution another claim does not replace."""
    replaced = {normalized(r.record.replaces) for r in claims if r.record.replaces}
    standing = [r for r in claims if normalized(r.source.distribution) not in replaced]
    return standing or claims


