"""Registry: records of one kind by name.

A name that two distributions claim fails only when it is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from typing import Any, Generic, TypeVar, cast

import attrs

from quark.base.lazy import Reference
from quark.base.names import closest
from quark.errors import AmbiguousNameError, ConfigError, PluginError, UnknownNameError, UnsupportedError
from quark.plugins.discovery import RUN_TIME, Source, normalized
from quark.plugins.failures import PluginFailure, leave_out
from quark.plugins.options import Option
from quark.plugins.record_fields import KEY, Expected
from quark.plugins.records import Record

R = TypeVar("R", bound=Record)


@attrs.frozen
class Kind:
    """A kind of thing that plugins provide.

    Attributes:
        name: Singular, for messages: ``"scheme"``.
        plural: Name of its registry and of its listing: ``"schemes"``.
        record: Class that its hook yields.
        registry: Class of its registry, which has a typed method for each reference of its records.
        distribution: Distribution of the built-in ones, for messages.
    """

    name: str
    plural: str
    record: type[Record]
    registry: type[Registry[Any]]
    distribution: str

    @property
    def hook(self) -> str:
        """Name of the provider hook."""
        return f"quark_register_{self.plural}"


@attrs.frozen
class Registered:
    """A record and the plugin it came from."""

    record: Record
    source: Source


def unreplaced(claims: Iterable[Registered]) -> list[Registered]:
    """Return the claims on one name, without claims that another distribution replaces."""
    claims = list(claims)
    replaced = {
        normalized(c.record.replaces)
        for c in claims
        if c.record.replaces is not None and normalized(c.record.replaces) != c.source.distribution
    }
    standing = [c for c in claims if c.source.distribution not in replaced]
    return standing or claims  # if two replace each other, both stay contested


def _standing_names(entries: Iterable[Registered]) -> list[str]:
    """Return the sorted names of entries.

    If several distributions claim a name, it appears once for each, as ``"distribution:name"``.
    """
    by_name: dict[str, list[Registered]] = {}
    for entry in entries:
        by_name.setdefault(entry.record.name, []).append(entry)
    names: list[str] = []
    for name, claims in by_name.items():
        standing = unreplaced(claims)
        names += [name] if len(standing) == 1 else [f"{c.source.distribution}:{name}" for c in standing]
    return sorted(names)


class Registry(Generic[R]):
    """All records of one kind.

    Iterating yields the records of `names`. A registry is a view on the records of plugins and on records
    that were registered at run time.

    Args:
        kind: The kind of its records.
        entries: Records with their plugins. The list is not copied, so that a set of plugins has one list.
        failures: Returns the failures of all plugins, for messages.
        missing: Returns a sentence about distributions that are not installed or left out, for messages; it
            may be empty.
    """

    def __init__(
        self,
        kind: Kind,
        entries: list[Registered],
        failures: Callable[[], Sequence[PluginFailure]],
        missing: Callable[[Sequence[str]], str],
    ) -> None:
        self.kind = kind
        self._entries = entries
        self._failures = failures
        self._missing = missing
        self._index: tuple[tuple[int, int], dict[str, list[Registered]]] | None = None
        self._changes = 0

    def names(self) -> list[str]:
        """Return all names, sorted, without aliases; each can be given to `get`.

        If several distributions claim a name, it appears once for each, as ``"distribution:name"``.
        """
        return _standing_names(self._entries)

    def plugin_names(self) -> list[str]:
        """Return the names of plugins' records, even if run-time records replace them."""
        return _standing_names(entry for entry in self._entries if entry.source.distribution != RUN_TIME)

    def run_time_names(self) -> list[str]:
        """Return names that `register` added for the program itself, in the order of registration."""
        return [entry.record.name for entry in self._entries if entry.source.distribution == RUN_TIME]

    def get(self, name: str) -> R:
        """Return the record of that name, of that alias, or of ``"distribution:name"``.

        Raises:
            UnknownNameError: (a ValueError) There is none. The message names all records, the closest match
                and missing distributions.
            AmbiguousNameError: (a ValueError) Several distributions claim the name. The message says which,
                and how to choose.
        """
        return cast(R, self._find(name).record)

    def _load(self, name: str, field: str) -> Any:
        """Return the object of a reference of a record.

        The registry of each kind has a typed method for each of its references.

        Args:
            name: As for `get`.
            field: Field of the record, such as ``"config"``.

        Raises:
            UnsupportedError: (a NotImplementedError) The record leaves that field empty.
            PluginError: The reference leads nowhere, its module cannot be imported, or the object is not what
                the record says. The message names the plugin.
        """
        entry = self._find(name)
        reference = getattr(entry.record, field)
        if reference is None:
            raise UnsupportedError(f"the {self.kind.name} '{entry.record.name}' of {entry.source.distribution} has no {field}")
        what = f"'{field}' of the {self.kind.name} '{entry.record.name}'"
        loaded = load_for(reference, what, entry.source)
        expected: Expected = getattr(attrs.fields(type(entry.record)), field).metadata[KEY]
        if (complaint := expected.complaint(entry.record, loaded)) is not None:
            raise PluginError(f"{what} points at '{reference}', which {complaint}. It comes from {entry.source}: {leave_out(entry.source)}")
        return loaded

    def options(self, name: str) -> tuple[Option, ...]:
        """Return the declared options of a record; if there are none, load its code and return its options.

        Raises:
            UnknownNameError: As `get` does.
            PluginError: The code cannot be loaded.
        """
        record = self.get(name)
        if record.options is not None:
            return record.options
        for field in attrs.fields(type(record)):
            expected: Expected | None = field.metadata.get(KEY)
            if expected is not None and expected.options is not None and getattr(record, field.name) is not None:
                return expected.options(self._load(name, field.name))
        return ()

    def source(self, name: str) -> Source:
        """Return where the record of that name comes from; raises as `get` does."""
        return self._find(name).source

    def conflicts(self) -> dict[str, tuple[Source, ...]]:
        """Return contested names and aliases, with the distributions that claim them."""
        candidates = {key: self._candidates(key) for key in sorted(self._claims_by_key())}
        return {key: tuple(c.source for c in entries) for key, entries in candidates.items() if len(entries) > 1}

    def failures(self) -> tuple[PluginFailure, ...]:
        """Return the failures of plugins of all kinds; a plugin that fails to import has no records."""
        return tuple(self._failures())

    def register(self, record: R, source: Source | None = None) -> None:
        """Add a record while the program runs.

        Args:
            record: A record of this kind. ``replaces=`` works as for plugins.
            source: Where it comes from; by default the program itself, ``"run-time"``.

        Raises:
            ConfigError: (a ValueError) It is of another kind, or one of its names is taken.
        """
        if not isinstance(record, self.kind.record):
            raise ConfigError(f"a {self.kind.record.__name__} is needed to register a {self.kind.name}, not {record!r}")
        replaced = None if record.replaces is None else normalized(record.replaces)
        for key in (record.name, *record.aliases):
            if taken := next((e for e in self._claims_by_key().get(key, ()) if e.source.distribution != replaced), None):
                raise ConfigError(
                    f"the {self.kind.name} name '{key}' is taken by {taken.source}: choose another name, "
                    f'or register it with replaces="{taken.source.distribution}"'
                )
        self._entries.append(Registered(record, source or Source(RUN_TIME)))
        self._changes += 1

    def unregister(self, name: str) -> None:
        """Remove the record that `register` added last under that name.

        Raises:
            UnknownNameError: (a ValueError) There is none of that name.
            ConfigError: (a ValueError) A plugin provides it.
        """
        entry = next((e for e in reversed(self._entries) if e.record.name == name and not e.source.entry_point), None)
        if entry is None:
            source = self._find(name).source
            raise ConfigError(
                f"the {self.kind.name} '{name}' comes with {source} and cannot be taken out of a running program; "
                f"leave the plugin out with QUARK_DISABLED_PLUGINS={source.distribution}"
            )
        self._entries.remove(entry)
        self._changes += 1

    def claims(self) -> list[Registered]:
        """Return every record with its plugin, sorted by name, including replaced and contested ones."""
        return sorted(self._entries, key=lambda e: (e.record.name, e.source.distribution))

    @property
    def revision(self) -> tuple[int, int]:
        """A value that changes with the records, for caches of derived things."""
        return len(self._entries), self._changes

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(self._candidates(name))

    def __iter__(self) -> Iterator[R]:
        return iter([self.get(name) for name in self.names()])

    def __len__(self) -> int:
        return len(self.names())

    def __repr__(self) -> str:
        return f"<{self.kind.plural}: {', '.join(self.names()) or 'none'}>"

    def _claims_by_key(self) -> dict[str, list[Registered]]:
        """Return entries by name and alias.

        The index is rebuilt when they change, because plugins' records are added to the list from outside.
        """
        if self._index is None or self._index[0] != self.revision:
            by_key: dict[str, list[Registered]] = {}
            for entry in self._entries:
                for key in dict.fromkeys((entry.record.name, *entry.record.aliases)):
                    by_key.setdefault(key, []).append(entry)
            self._index = (self.revision, by_key)
        return self._index[1]

    def _candidates(self, name: str) -> list[Registered]:
        """Return entries that ``name`` may mean: none, one, or several that compete."""
        distribution, colon, plain = name.rpartition(":")
        claims = self._claims_by_key().get(plain, [])
        if colon:
            return [c for c in claims if c.source.distribution == normalized(distribution)]
        # An alias of a replaced record leads to the record that replaces it.
        named = {c.record.name: [e for e in self._claims_by_key()[c.record.name] if e.record.name == c.record.name] for c in claims}
        standing = [winner for c in claims for winner in unreplaced(named[c.record.name])]
        return unreplaced({id(c): c for c in standing}.values())

    def _find(self, name: str) -> Registered:
        entries = self._candidates(name) if isinstance(name, str) else []
        if len(entries) == 1:
            return entries[0]
        if entries:
            choices = " or ".join(f"'{c.source.distribution}:{c.record.name}'" for c in entries)
            raise AmbiguousNameError(
                f"the {self.kind.name} '{name}' is claimed by {' and by '.join(str(c.source) for c in entries)}. "
                f"Ask for {choices}, leave one out with QUARK_DISABLED_PLUGINS, "
                f'or let one record say replaces="{entries[0].source.distribution}"'
            )
        names, kind = self.names(), self.kind
        aliases = [alias for entry in self._entries for alias in entry.record.aliases]
        missing = self._missing((kind.distribution,)) or "If another distribution provides it, install that one."
        reasons = [f"Installed {kind.plural}: {', '.join(names) or 'none'}.", missing]
        message = not_there(f"there is no {kind.name} '{name}'.", str(name), [*names, *aliases], reasons, self._failures())
        raise UnknownNameError(message, kind=kind.name, name=str(name), known=names)


def not_there(error: str, name: str, known: Sequence[str], reasons: Sequence[str], failures: Iterable[PluginFailure]) -> str:
    """Return the message of an UnknownNameError: the closest known name, reasons, and broken plugins."""
    near = closest(name, known)
    sentences = [error, *([f"Did you mean '{near}'?"] if near else []), *reasons]
    return " ".join([*sentences, *(f"A plugin is broken: {failure}." for failure in failures)])


def load_for(reference: Reference, what: str, source: Source) -> Any:
    """Load a plugin's lazy reference; text that its module prints goes to stderr.

    Raises:
        PluginError: It leads nowhere, or importing its module raised. The message names the plugin, its
            distribution and the fix.
    """
    try:
        with redirect_stdout(sys.stderr):
            return reference.load()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise PluginError(
            f"{what} points at '{reference}', which cannot be loaded ({type(error).__name__}: {error}). "
            f"It comes from {source}: {leave_out(source, error)}"
        ) from error
