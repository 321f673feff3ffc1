"""Mutant: a plugin with one thing wrong, and the check that has to notice it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import attrs

from quark.plugins import API_VERSION, Catalog, Record, Source, hookimpl
from quark.plugins.discovery import discover
from quark.plugins.registries import KINDS
from quark_devkit import Subject, find_subject

__all__ = ["DISTRIBUTION", "Mutant", "plugin_of", "subject_among"]

DISTRIBUTION = "mutant-quant"


@attrs.frozen(eq=False)
class Mutant:
    """A broken plugin.

    Attributes:
        check: Id of the check that fails for it: ``"format:saturates"``.
        about: What is broken, as a predicate.
        records: What it registers; the first one is the subject.
        registers: Instead of ``records``: makes the plugin object, for what no record can express.
        subject: Instead of both: gives the subject, with files in the directory that it gets, for as long as
            it is checked.
        says: A part of the message that the check has for it.
    """

    check: str
    about: str
    records: Sequence[Record] = ()
    registers: Callable[[], object] | None = None
    subject: Callable[[Path], AbstractContextManager[Subject]] | None = None
    says: str = ""

    @property
    def id(self) -> str:
        """For test ids."""
        return f"{self.check}-{'_'.join(self.about.split())}"


def plugin_of(records: Sequence[Record]) -> object:
    """A plugin object that registers the records, each through the hook of its kind."""
    hooks: dict[str, Any] = {"QUARK_API": (API_VERSION, API_VERSION)}
    for kind in KINDS:
        own = [record for record in records if isinstance(record, kind.record)]
        if own:
            hooks[kind.hook] = hookimpl(_yielding(own, kind.hook))
    return type("Plugin", (), hooks)()


def _yielding(records: list[Record], name: str) -> Callable[[Any], Iterator[Record]]:
    def hook(self: Any) -> Iterator[Record]:
        yield from records

    hook.__name__ = name
    return hook


def subject_among(kind: str, records: Sequence[Record], plugin: object | None = None) -> Subject:
    """The first record as a subject, registered beside the installed plugins."""
    catalog = Catalog(discover())
    catalog.add(plugin if plugin is not None else plugin_of(records), Source(DISTRIBUTION, "0.1", entry_point="mutant"))
    return find_subject(catalog, kind, DISTRIBUTION if kind == "distribution" else records[0].name)
