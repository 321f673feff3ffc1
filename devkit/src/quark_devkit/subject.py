"""Subject of a check: one record of a plugin, or a whole distribution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from quark.base.names import closest
from quark.errors import ConfigError, UnknownNameError
from quark.plugins import Catalog
from quark.plugins.discovery import normalized
from quark.plugins.program_records import ExporterRecord
from quark.plugins.records import AlgorithmRecord, Record
from quark.plugins.registry import Registered
from quark_devkit.own_catalog import among_its_own

__all__ = ["KINDS", "Subject", "distributions", "find_subject", "subjects"]

_REGISTRIES = {
    "format": "formats",
    "observer": "observers",
    "scheme": "schemes",
    "rounding": "algorithms",
    "transform": "algorithms",
    "block_tuning": "algorithms",
    "branch": "algorithms",
    "template": "templates",
    "layout": "exporters",
    "selector": "selectors",
    "layer_type": "layer_types",
    "dataset": "datasets",
    "metric": "metrics",
    "quant_mode": "quant_modes",
    "graph_op": "graph_ops",
}
KINDS = (*_REGISTRIES, "distribution")
"""Kinds of subjects, in the order in which they are checked."""


@attrs.frozen(eq=False)
class Subject:
    """One thing to check.

    Attributes:
        kind: One of `KINDS`.
        name: Name of the record or the distribution.
        distribution: The distribution of the record.
        version: Version of that distribution.
        record: The record; None for a distribution.
        catalog: The plugins that are active during a check. For a record: the plugins of the record's
            distribution, the plugins of that distribution's requirements, and the built-in plugins. For a
            distribution: all plugins, since they may claim the same names.
        source_directory: The directory of the distribution's ``pyproject.toml``; None if it is not known.
    """

    kind: str = attrs.field(validator=attrs.validators.in_(KINDS))
    name: str
    distribution: str
    version: str
    record: Any
    catalog: Catalog = attrs.field(repr=False)
    source_directory: Path | None = None

    @property
    def id(self) -> str:
        """Kind and name: ``"scheme:acme_int3"``."""
        return f"{self.kind}:{self.name}"

    @property
    def lookup_name(self) -> str:
        """The name by which the registry finds this record: the full name if several records have the same
        short name."""
        full = f"{self.distribution}:{self.name}"
        return full if self.name in self.registry.conflicts() or self.registry.get(self.name) is not self.record else self.name

    @property
    def registry(self) -> Any:
        """The registry that contains the record."""
        return self.catalog.registries[_REGISTRIES[self.kind]]

    def load(self, field: str) -> Any:
        """Return the object that a field of the record references: ``load("observer")``."""
        return getattr(self.registry, f"load_{field}")(self.lookup_name)

    def declares(self, capability: str) -> bool:
        """Return whether the record declares a capability."""
        return self.record is not None and capability in self.record.capabilities

    def __str__(self) -> str:
        return f"{self.kind.replace('_', ' ')} '{self.name}' of {self.distribution} {self.version}".rstrip()


def distributions(catalog: Catalog) -> dict[str, str]:
    """Return the distributions that have plugins, with their versions. Plugins that failed or that an
    environment variable leaves out count too."""
    sources = [*catalog.sources(), *(failure.source for failure in catalog.failures()), *catalog.left_out]
    return {source.distribution: source.version for source in sources}


def subjects(catalog: Catalog, distribution: str, kinds: Sequence[str] = KINDS, source_directory: Path | None = None) -> Iterator[Subject]:
    """Yield the records of a distribution as subjects, kind by kind, then the distribution itself.

    Args:
        catalog: The plugins.
        distribution: Name of the distribution, in any spelling.
        kinds: Kinds to yield; empty for all.
        source_directory: The directory of the distribution's ``pyproject.toml``, for checks of the
            distribution.

    Raises:
        UnknownNameError: The distribution has no plugin.
        ConfigError: A kind is unknown.
    """
    wanted, versions = normalized(distribution), distributions(catalog)
    if wanted not in versions:
        near = closest(wanted, versions)
        hint = f"; did you mean {near!r}?" if near else "."
        raise UnknownNameError(
            f"no installed distribution '{distribution}' has an entry point of the group quark{hint} "
            f"Distributions with plugins: {', '.join(sorted(versions))}",
            kind="distribution",
            name=distribution,
            known=sorted(versions),
        )
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ConfigError(f"{unknown[0]!r} is not a kind of subject: use one of {', '.join(KINDS)}")
    own = among_its_own(catalog, wanted)
    for kind in (kind for kind in KINDS if kind in kinds):
        if kind == "distribution":
            yield Subject(kind, wanted, wanted, versions[wanted], None, catalog, source_directory)
            continue
        claims: list[Registered] = list(own.registries[_REGISTRIES[kind]].claims())
        for claim in claims:
            if claim.source.distribution == wanted and _is_of(kind, claim.record):
                yield Subject(kind, claim.record.name, wanted, versions[wanted], claim.record, own, source_directory)


def find_subject(catalog: Catalog, kind: str, name: str) -> Subject:
    """Return the record with the given kind and name, or the distribution with the given name.

    Args:
        catalog: The plugins.
        kind: One of `KINDS`.
        name: As for `quark.plugins.Registry.get`: a name, or ``"distribution:name"``.

    Raises:
        UnknownNameError, AmbiguousNameError: `quark.plugins.Registry.get` raises the error for this name.
        ConfigError: The algorithm with this name is of another kind, or no plugin writes the layout with this
            name.
    """
    if kind == "distribution":
        return next(subjects(catalog, name, [kind]))
    registry = catalog.registries[_REGISTRIES[kind]]
    record, source = registry.get(name), registry.source(name)
    if not _is_of(kind, record):
        why = (
            "no installed plugin writes that layout"
            if isinstance(record, ExporterRecord)
            else "it is registered as another kind of algorithm"
        )
        raise ConfigError(f"'{record.name}' cannot be checked as {kind}: {why}")
    return Subject(kind, record.name, source.distribution, source.version, record, among_its_own(catalog, source.distribution))


def _is_of(kind: str, record: Record) -> bool:
    if isinstance(record, ExporterRecord):
        return record.exporter is not None  # the checks of a layout write a checkpoint first
    return not isinstance(record, AlgorithmRecord) or record.kind == kind
