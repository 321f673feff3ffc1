"""Names of AMD Quark's public API that plugins bring, such as ``Int4PerGroupSpec``: an index of the exports of all records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from quark.base.lazy import Reference
from quark.base.names import closest
from quark.errors import AmbiguousNameError, UnknownNameError
from quark.plugins.collection import Registered
from quark.plugins.failures import PluginFailure
from quark.plugins.kinds import BUILT_IN
from quark.plugins.registry import Registry, load_for, unreplaced

__all__ = ["Exports"]


@attrs.frozen
class Exports:
    """The exports of all records.

    Attributes:
        registries: By kind.
        failures: Gives the failures of all plugins, for messages.
        missing: Says which distributions are not there, for messages.
    """

    registries: Mapping[str, Registry[Any]]
    failures: Callable[[], Sequence[PluginFailure]]
    missing: Callable[[Sequence[str]], str]

    def load(self, name: str) -> Any:
        """Return the object that a record exports as ``name``, a plain name or ``"module:name"``.

        Raises:
            UnknownNameError: (a ValueError) No record brings it; says which distribution may be missing.
            AmbiguousNameError: (a ValueError) Two distributions bring different objects under this name.
            PluginError: The record's reference cannot be loaded.
        """
        claims = self._claims(name)
        if not claims:
            known = sorted({key for entry in self._entries() for key in entry.record.exports})
            raise UnknownNameError(self._unknown(name, known), kind="public name", name=name, known=known)
        if len({c.record.exports[name] for c in claims}) > 1:
            raise AmbiguousNameError(
                f"'{name}' is brought by {' and by '.join(dict.fromkeys(str(c.source) for c in claims))}, each with its own object. "
                f'Leave one out with QUARK_DISABLED_PLUGINS, or let one record say replaces="{claims[0].source.distribution}"'
            )
        return load_for(claims[0].record.exports[name], f"the public name '{name}'", claims[0].source)

    def names(self) -> list[str]:
        """Return all plain names, sorted."""
        return sorted({key for entry in self._entries() for key in entry.record.exports if ":" not in key})

    def modules(self) -> dict[str, dict[str, Reference]]:
        """Return public modules that records bring, each with its names; names that two records claim are left out, and fail in `load`."""
        out: dict[str, dict[str, Reference]] = {}
        for key in sorted({key for entry in self._entries() for key in entry.record.exports if ":" in key}):
            module, _, name = key.partition(":")
            references = {c.record.exports[key] for c in self._claims(key)}
            if len(references) == 1:
                out.setdefault(module, {})[name] = references.pop()
        return out

    def _entries(self) -> Iterator[Registered]:
        for registry in self.registries.values():
            yield from registry.claims()

    def _claims(self, name: str) -> list[Registered]:
        return unreplaced(entry for entry in self._entries() if name in entry.record.exports)

    def _unknown(self, name: str, known: Sequence[str]) -> str:
        near = closest(name, known)
        parts = [f"no installed plugin brings '{name}'."]
        parts += [f"Did you mean '{near}'?"] if near else []
        parts += [missing] if (missing := self.missing(BUILT_IN)) else []
        parts += [f"A plugin is broken: {failure}." for failure in self.failures()]
        return " ".join(parts)
