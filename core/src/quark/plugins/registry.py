"""`Registry` finds the records of one kind by name.

If two distributions register the same name, only the lookup of that name raises an error.
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
        name: Name of the kind in the singular, such as ``"scheme"``. Messages show it.
        plural: Name of the registry and of the listing, such as ``"schemes"``.
        record: Class of the records.
        registry: Class of the registry. It has a typed method for each reference of the records.
        distribution: Name of the distribution that provides the built-in records. Messages show it.
    """

    name: str
    plural: str
    record: type[Record]
    registry: type[Registry[Any]]
    distribution: str

    @property
    def hook(self) -> str:
        """Name of the hook that returns records of this kind."""
        return f"quark_register_{self.plural}"


@attrs.frozen
class Registered:
    """A record, and the plugin that registered it."""

    record: Record
    source: Source


def unreplaced(claims: Iterable[Registered]) -> list[Registered]:
    """Return those of the records ``claims`` that no record of another distribution replaces.

    ``claims`` are all records that have the same name.
    """
    claims = list(claims)
    replaced = {
        normalized(c.record.replaces)
        for c in claims
        if c.record.replaces is not None and normalized(c.record.replaces) != c.source.distribution
    }
    standing = [c for c in claims if c.source.distribution not in replaced]
    return standing or claims  # if two records replace each other, the name stays ambiguous


def _standing_names(entries: Iterable[Registered]) -> list[str]:
    """Return the sorted names of entries.

    If several distributions register a name, the result contains ``"distribution:name"`` for each of them.
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

    An iteration yields the records of `names`. A registry contains the records of plugins, and the records
    that a program registers while it runs.

    Args:
        kind: The kind of the records.
        entries: Records with their plugins. The registry does not copy the list, because plugins that are
            imported later add their records to it.
        failures: Function that returns the failures of all plugins. Messages show them.
        missing: Function that takes names of distributions. It returns sentences for messages about those
            distributions that are not installed or are left out. The result may be empty.
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
        """Return the sorted names of all records, without aliases. `get` accepts each of these names.

        If several distributions register a name, the result contains ``"distribution:name"`` for each of
        them.
        """
        return _standing_names(self._entries)

    def plugin_names(self) -> list[str]:
        """Return the names of the records of plugins, including records that a run-time record replaces."""
        return _standing_names(entry for entry in self._entries if entry.source.distribution != RUN_TIME)

    def run_time_names(self) -> list[str]:
        """Return the names of the records that the program added with `register`, in the order of these
        calls."""
        return [entry.record.name for entry in self._entries if entry.source.distribution == RUN_TIME]

    def get(self, name: str) -> R:
        """Return the record whose name or alias is ``name``.

        ``"distribution:name"`` chooses the record of one distribution.

        Raises:
            UnknownNameError: (a ValueError) There is no such record. The message lists all names, the closest
                match and missing distributions.
            AmbiguousNameError: (a ValueError) Several distributions register the name. The message names the
                distributions and says how to choose one.
        """
        return cast(R, self._find(name).record)

    def _load(self, name: str, field: str) -> Any:
        """Return the object to which a field of a record refers.

        The subclass of `Registry` for each kind of record has a typed method for each field that is a
        reference.

        Args:
            name: Name of the record, as for `get`.
            field: Field of the record that holds a reference, such as ``"config"``.

        Raises:
            UnsupportedError: (a NotImplementedError) The field is None.
            PluginError: The reference cannot be loaded, or the object is of another kind than the record
                says. The message names the plugin.
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
        """Return the options that a record declares. If the record declares none, return the options of the
        code that the record points at.

        Raises:
            UnknownNameError, AmbiguousNameError: `get` raises this error.
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
        """Return the source of the record with the name ``name``. Raise the same errors as `get`."""
        return self._find(name).source

    def conflicts(self) -> dict[str, tuple[Source, ...]]:
        """Return a dictionary from each ambiguous name or alias to the sources of its records."""
        candidates = {key: self._candidates(key) for key in sorted(self._claims_by_key())}
        return {key: tuple(c.source for c in entries) for key, entries in candidates.items() if len(entries) > 1}

    def failures(self) -> tuple[PluginFailure, ...]:
        """Return the failures of all plugins. It is unknown which records a broken plugin would have
        registered."""
        return tuple(self._failures())

    def register(self, record: R, source: Source | None = None) -> None:
        """Add a record while the program runs.

        Args:
            record: A record of the kind of this registry. The field ``replaces`` works as in plugins.
            source: Source of the record. By default it is the program itself, as ``"run-time"``.

        Raises:
            ConfigError: (a ValueError) The record is of another kind, or another record already has one of
                the new record's names.
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
        """Remove the record with the name ``name`` that `register` added last.

        Raises:
            UnknownNameError: (a ValueError) There is no record with this name.
            ConfigError: (a ValueError) The record comes from a plugin.
        """
        entry = next((e for e in reversed(self._entries) if e.record.name == name and not e.source.entry_point), None)
        if entry is None:
            source = self._find(name).source
            raise ConfigError(
                f"the {self.kind.name} '{name}' comes from {source} and cannot be removed from a running program; "
                f"leave the plugin out with QUARK_DISABLED_PLUGINS={source.distribution}"
            )
        self._entries.remove(entry)
        self._changes += 1

    def claims(self) -> list[Registered]:
        """Return every record with its plugin, sorted by name.

        The result includes records that other records replace, and several records with the same name.
        """
        return sorted(self._entries, key=lambda e: (e.record.name, e.source.distribution))

    @property
    def revision(self) -> tuple[int, int]:
        """A value that changes whenever the records change. Caches compare it."""
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
        """Return a dictionary from each name or alias to the entries that have this name or alias.

        The dictionary is built again if the entries have changed, because other code adds records of plugins
        to the list of entries.
        """
        if self._index is None or self._index[0] != self.revision:
            by_key: dict[str, list[Registered]] = {}
            for entry in self._entries:
                for key in dict.fromkeys((entry.record.name, *entry.record.aliases)):
                    by_key.setdefault(key, []).append(entry)
            self._index = (self.revision, by_key)
        return self._index[1]

    def _candidates(self, name: str) -> list[Registered]:
        """Return the entries to which ``name`` may refer. If there are several, the name is ambiguous."""
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
    """Return the message of an UnknownNameError.

    The message consists of ``error``, the known name that is closest to ``name``, the reasons, and the
    failures of plugins.
    """
    near = closest(name, known)
    sentences = [error, *([f"Did you mean '{near}'?"] if near else []), *reasons]
    return " ".join([*sentences, *(f"A plugin is broken: {failure}." for failure in failures)])


def load_for(reference: Reference, what: str, source: Source) -> Any:
    """Return the object to which a plugin's reference points. Text that the import of the module prints goes
    to stderr.

    Raises:
        PluginError: The object does not exist, or the import raised. The message names the plugin, the
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
