"""Checks of all records of a distribution: their references, names and descriptions."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from quark.base.lazy import LazyRef
from quark.base.log import unprintable
from quark.errors import QuarkError
from quark.plugins.discovery import CORE, RUN_TIME, normalized
from quark.plugins.model_records import LayerTypeRecord, TemplateRecord
from quark.plugins.program_records import ExporterRecord
from quark.plugins.record_fields import KEY
from quark.plugins.records import ObserverRecord, Record
from quark.plugins.registries import BUILT_IN
from quark.plugins.registry import Registered, Registry
from quark_devkit.check import CheckFailedError, check, require
from quark_devkit.checks.distribution.facts import claims_of
from quark_devkit.subject import Subject

_BUILT_IN = {CORE, *BUILT_IN}


@check("distribution")
def points_at_what_there_is(subject: Subject) -> None:
    """Every reference of every record points at an object of the right kind that agrees with the record."""
    complaints = [complaint for registry, claim in claims_of(subject) for complaint in _bad_references(registry, claim)]
    if complaints:
        more = f" (and {len(complaints) - 1} more)" if len(complaints) > 1 else ""
        raise CheckFailedError(f"has a record whose target does not exist: {complaints[0]}{more}")


def _bad_references(registry: Registry[Any], claim: Registered) -> Iterator[str]:
    record = claim.record
    for field in attrs.fields(type(record)):
        if KEY in field.metadata and getattr(record, field.name) is not None:
            try:
                registry._load(f"{claim.source.distribution}:{record.name}", field.name)
            except QuarkError as error:
                yield str(error)
    loads: dict[str, Callable[[], object]] = {f"the export '{name}'": ref.load for name, ref in record.exports.items()}
    if isinstance(record, TemplateRecord) and (modeling := record.modeling) is not None:
        loads["modeling"] = lambda: importlib.import_module(modeling)
    for what, load in loads.items():
        try:
            load()
        except (Exception, SystemExit) as error:  # third-party code may raise anything
            yield f"{what} of '{record.name}' cannot be loaded ({type(error).__name__}: {error})"


@check("distribution")
def claims_no_name_of_another(subject: Subject) -> None:
    """No other third-party distribution claims the same names, observer classes, layer classes or
    checkpoints.
    """
    if subject.distribution not in _BUILT_IN:  # otherwise the other distribution must change its name
        _refuse_contested(subject, lambda distribution: distribution not in _BUILT_IN)


@check("distribution")
def replaces_a_built_in_only_by_saying_so(subject: Subject) -> None:
    """A record that claims the name, class or checkpoints of a built-in record names the built-in
    distribution in ``replaces``. The distribution that ``replaces`` names has a record of the same name.
    """
    _refuse_contested(subject, lambda distribution: distribution in _BUILT_IN)
    installed = {source.distribution for source in subject.catalog.sources()}
    for registry, claim in claims_of(subject):
        name, replaced = claim.record.name, claim.record.replaces
        if replaced is not None and normalized(replaced) in installed:
            owners = {other.source.distribution for other in registry.claims() if other.record.name == name}
            require(normalized(replaced) in owners, f"replaces '{name}' of {replaced}, which has no {registry.kind.name} of that name")


def _refuse_contested(subject: Subject, counts: Callable[[str], bool]) -> None:
    """Raise CheckFailedError for the first record that has a key of another distribution's record.

    Other distributions count only if ``counts`` returns True for their name.
    """
    for registry, claim in claims_of(subject):
        for other in registry.claims():
            owner = other.source.distribution
            if owner in (subject.distribution, RUN_TIME) or not counts(owner) or _replaces(claim, other) or _replaces(other, claim):
                continue
            if common := sorted(_identities(claim.record) & _identities(other.record)):
                fix = f"choose another, or set replaces='{owner}'" if other.record.name == claim.record.name else "choose another"
                whose = f"its {registry.kind.name} '{claim.record.name}'"
                raise CheckFailedError(f"claims {common[0]} for {whose}, but {owner} claims it for '{other.record.name}': {fix}")


def _replaces(claim: Registered, other: Registered) -> bool:
    """Return whether a claim declares that it replaces the other claim."""
    replaced = claim.record.replaces
    return replaced is not None and normalized(replaced) == other.source.distribution and claim.record.name == other.record.name


def _identities(record: Record) -> set[str]:
    """Return the keys of a record. No other record of the same kind may have one of these keys."""
    found_by = {f"the name '{name}'" for name in (record.name, *record.aliases)}
    if isinstance(record, ObserverRecord):
        found_by.add(f"the class name '{record.class_name}'")
    if isinstance(record, LayerTypeRecord):
        found_by.add(f"the layer class '{record.layer}'")
    if isinstance(record, ExporterRecord) and record.reader is not None:
        marks = "".join(f" and {key} '{value}'" for key, value in sorted(record.marks.items()))
        found_by |= {f"checkpoints of quant_method '{method}'{marks}" for method in record.quant_methods}
    return found_by


@check("distribution")
def describes_every_record(subject: Subject) -> None:
    """Every record has a one-line summary for listings."""
    for registry, claim in claims_of(subject):
        lines = claim.record.summary.strip().splitlines()
        what = f"the {registry.kind.name} '{claim.record.name}'"
        require(len(lines) == 1, f"describes {what} in {len(lines)} lines: write a summary of one line")


@check("distribution")
def has_texts_that_a_terminal_can_show(subject: Subject) -> None:
    """No text of a record has control characters, which a terminal would execute."""
    for registry, claim in claims_of(subject):
        for field in attrs.fields(type(claim.record)):
            for text in _texts(getattr(claim.record, field.name)):
                if (character := unprintable(text)) is not None:
                    where = f"{field.name} of the {registry.kind.name} '{claim.record.name}'"
                    raise CheckFailedError(f"has the control character {character!r} in {where}: remove it")


def _texts(value: object) -> Iterator[str]:
    """Yield all strings in the value of a field."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, LazyRef):
        yield value.target
    elif isinstance(value, Mapping):
        yield from _texts((*value.keys(), *value.values()))
    elif isinstance(value, tuple | frozenset | list):
        for member in value:
            yield from _texts(member)
    elif attrs.has(cls := type(value)):
        yield from _texts([getattr(value, field.name) for field in attrs.fields(cls)])
