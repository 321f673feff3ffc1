"""Find installed plugins: entry points of the group ``quark``, allowed or denied before anything is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping

import attrs
import importlib_metadata

from quark.plugins.hookspecs import GROUP
from quark.plugins.sources import Source

ALLOW = "QUARK_PLUGINS"
DENY = "QUARK_DISABLED_PLUGINS"
STRICT = "QUARK_STRICT_PLUGINS"


@attrs.frozen
class Candidate:
    """An installed plugin that has not been imported."""

    source: Source


def normalized(name: str) -> str:
    """A distribution's name as installers compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def discover(environ: Mapping[str, str] | None = None, path: Iterable[str] | None = None) -> list[Candidate]:
    """The plugins installed on ``path`` (default: this interpreter's), in order of distribution and entry point.

    ``QUARK_PLUGINS`` lists those allowed and ``QUARK_DISABLED_PLUGINS`` those denied, by distribution or entry-point name, with commas between.
    """
    environ = os.environ if environ is None else environ
    allowed, denied = _listed(environ.get(ALLOW)), _listed(environ.get(DENY))
    found = [c for c in _installed(path) if not denied & _names(c) and (not allowed or allowed & _names(c))]
    return sorted(found, key=lambda c: (normalized(c.source.distribution), c.source.entry_point))


def _installed(path: Iterable[str] | None) -> Iterator[Candidate]:
    seen: set[str] = set()
    distributions = importlib_metadata.distributions() if path is None else importlib_metadata.distributions(path=list(path))
    for distribution in distributions:
        name = distribution.name
        if not name or normalized(name) in seen:
            continue  # the first on the path is the one that imports
        seen.add(normalized(name))
        for point in distribution.entry_points:
            if point.group == GROUP:
                yield Candidate(Source(name, distribution.version or "unknown", point.value, point.name))


def _listed(text: str | None) -> set[str]:
    return {normalized(part) for part in (text or "").split(",") if part.strip()} if text else set()


def _names(candidate: Candidate) -> set[str]:
    return {normalized(candidate.source.distribution), normalized(candidate.source.entry_point)}
