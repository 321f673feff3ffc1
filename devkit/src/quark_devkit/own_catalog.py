"""Catalogs of a few distributions. A record is checked together with the plugins that the record's
distribution requires."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from weakref import WeakKeyDictionary

import importlib_metadata

from quark.plugins import Catalog
from quark.plugins.discovery import CORE, name_in
from quark.plugins.registries import BUILT_IN

__all__ = ["among", "among_its_own"]

SUITE = "quark-devkit"
"""The suite's own distribution, which stays active during checks."""
_views: WeakKeyDictionary[Catalog, dict[object, Catalog]] = WeakKeyDictionary()


def among_its_own(catalog: Catalog, distribution: str) -> Catalog:
    """Return a catalog with the plugins of a distribution and of its requirements, the built-in plugins, and
    the plugin of the suite."""
    new = list(dict.fromkeys((distribution, SUITE)))
    names, others = {*BUILT_IN, *new}, _distributions(catalog) - {CORE}
    while new and not others <= names:
        fresh = _requirements(new.pop(), tuple(sys.path)) - names
        names |= fresh
        new += fresh
    return among(catalog, names)


@cache  # each check asks for hundreds of distributions: torch, and all that torch requires
def _requirements(distribution: str, path: tuple[str, ...]) -> frozenset[str]:
    """Return the distributions that a distribution requires, including those for extras. If the distribution
    is not installed, the result is empty.

    Args:
        distribution: Name of the distribution.
        path: ``sys.path``, which says where distributions are installed.
    """
    try:
        return frozenset(name_in(text) for text in importlib_metadata.requires(distribution) or ())
    except importlib_metadata.PackageNotFoundError:
        return frozenset()


def among(catalog: Catalog, distributions: Iterable[str]) -> Catalog:
    """Return a catalog with the plugins of these distributions and of the core. Nothing is imported again.

    If no other distribution is installed, return ``catalog`` itself.

    Args:
        catalog: All plugins.
        distributions: Normalized names.
    """
    wanted, all_of = frozenset(distributions) | {CORE}, catalog.collection
    if _distributions(catalog) <= wanted:
        return catalog
    key = (wanted, len(all_of.sources), len(all_of.failures), *(registry.revision for registry in catalog.registries.values()))
    views = _views.setdefault(catalog, {})
    if key not in views:
        view = views[key] = Catalog()
        view.distributions = catalog.distributions & wanted
        view.left_out = {source: variable for source, variable in catalog.left_out.items() if source.distribution in wanted}
        of_view = view.collection
        of_view.sources = {source: api for source, api in all_of.sources.items() if source.distribution in wanted}
        of_view.failures += [failure for failure in all_of.failures if failure.source.distribution in wanted]
        for plural, entries in all_of.records.items():
            of_view.records[plural][:] = [entry for entry in entries if entry.source.distribution in wanted]
        for all_hooks, hooks in ((all_of.listeners, of_view.listeners), (all_of.measuring, of_view.measuring)):
            for whose, listener in all_hooks:
                if getattr(whose, "distribution", None) in wanted:
                    hooks.add(whose, listener)
    return views[key]


def _distributions(catalog: Catalog) -> set[str]:
    """Return all distributions that have plugins or records, including plugins that an environment variable
    leaves out."""
    claims = (claim.source for entries in catalog.collection.records.values() for claim in entries)
    return {source.distribution for source in (*catalog.sources(), *catalog.left_out, *claims)}
