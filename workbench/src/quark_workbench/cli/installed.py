"""Plain data about the installed plugins and their records, for the tables and the JSON of the listings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs

from quark.base.lazy import LazyRef, ObjectRef
from quark.config.describe import describe_activation, describe_spec, effective_bits, needs_calibration
from quark.config.layer import QLayerConfig
from quark.errors import QuarkError
from quark.plugins.catalog import Catalog
from quark.plugins.discovery import Source
from quark.plugins.failures import PluginFailure, attempted
from quark.plugins.model_records import TemplateRecord
from quark.plugins.options import Option
from quark.plugins.records import AlgorithmRecord, Record, SchemeRecord
from quark.plugins.registry import Registered, Registry, load_for

__all__ = ["kind_report", "plugins_report", "record_report"]


def plugins_report(catalog: Catalog) -> dict[str, Any]:
    """Return a row for each plugin, with a status: active, failed, or left out.

    The result also has the failures, and a dictionary from kind of record to the names that conflict.
    """
    failed = {failure.source for failure in catalog.failures()}
    active = list(catalog.sources())
    rows = [_plugin(source, "active, with failures" if source in failed else "active", catalog) for source in active]
    rows += [_plugin(source, "failed", catalog) for source in sorted(failed - set(active), key=str)]
    rows += [_plugin(source, f"left out by {variable}", catalog) for source, variable in catalog.left_out.items()]
    conflicts = {kind: _conflicts(registry) for kind, registry in catalog.registries.items()}
    return {
        "plugins": rows,
        "conflicts": {kind: names for kind, names in conflicts.items() if names},
        "failures": [_failure(f) for f in catalog.failures()],
    }


def kind_report(catalog: Catalog, kind: str) -> dict[str, Any]:
    """Return all records of one kind, such as all schemes, with the facts about each record.

    The result also has the names of this kind that conflict, and the failures of all plugins.

    Args:
        catalog: The plugins.
        kind: The kind in the plural, such as ``"schemes"``.
    """
    registry = catalog.registries[kind]
    conflicts = _conflicts(registry)
    return {
        "kind": kind,
        kind: [_entry(claim, catalog, _status(claim, registry, conflicts)) for claim in registry.claims()],
        "conflicts": conflicts,
        "failures": [_failure(f) for f in catalog.failures()],
    }


def record_report(catalog: Catalog, kind: str, name: str) -> dict[str, Any]:
    """Return one record with the facts about it.

    Args:
        catalog: The plugins.
        kind: The kind in the plural, such as ``"schemes"``.
        name: Name or full name of the record. For an unknown name, `Registry.get` raises an error.
    """
    registry = catalog.registries[kind]
    record, source = registry.get(name), registry.source(name)
    claim, conflicts = Registered(record, source), registry.conflicts()
    unique = f"{source.distribution}:{record.name}" if record.name in conflicts else record.name
    return {"kind": kind, "name": unique, "entry": _entry(claim, catalog, _status(claim, registry, conflicts))}


def _plugin(source: Source, status: str, catalog: Catalog) -> dict[str, Any]:
    counts = {kind: sum(c.source == source for c in registry.claims()) for kind, registry in catalog.registries.items()}
    hooks = {"listeners": catalog.listeners, "measuring": catalog.measuring}
    counts |= {name: sum(whose == source for whose, _ in listeners) for name, listeners in hooks.items()}
    return attrs.asdict(source) | {"status": status, "provides": {kind: n for kind, n in counts.items() if n}}


def _failure(failure: PluginFailure) -> dict[str, Any]:
    return {"source": attrs.asdict(failure.source), "stage": failure.stage, "error": failure.error, "fix": failure.fix}


def _conflicts(registry: Registry[Any]) -> dict[str, list[dict[str, Any]]]:
    return {name: [attrs.asdict(s) for s in sources] for name, sources in registry.conflicts().items()}


def _entry(claim: Registered, catalog: Catalog, status: str) -> dict[str, Any]:
    record = claim.record
    facts = {a.name: _plain(getattr(record, a.name)) for a in attrs.fields(type(record)) if a.name not in _OBJECTS}
    derive = next((derive for kind, derive in _DERIVED.items() if isinstance(record, kind)), None)
    # A plugin's code derives these facts: if it fails, the listing still shows all other records.
    derived = {} if derive is None else attempted(partial(derive, claim, catalog), _error_of)
    return facts | {"api": catalog.api(claim.source), "status": status, "source": attrs.asdict(claim.source)} | derived


def _error_of(error: BaseException) -> dict[str, Any]:
    return {"error": str(error) if isinstance(error, QuarkError) else f"{type(error).__name__}: {error}"}


def _status(claim: Registered, registry: Registry[Any], conflicts: Mapping[str, object]) -> str:
    """Return ``active`` if looking up the record's name finds this record.

    Otherwise return ``contested`` if several records claim the name, or ``replaced`` if another one has it.
    """
    if claim.record.name in conflicts:
        return "contested"
    return "active" if registry.get(claim.record.name) is claim.record else "replaced"


def _plain(value: Any) -> Any:
    if isinstance(value, LazyRef | ObjectRef):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    return [_plain(v) for v in value] if isinstance(value, tuple) else value.to_dict() if isinstance(value, Option) else value


def _scheme_facts(claim: Registered, catalog: Catalog) -> dict[str, Any]:
    record = claim.record
    assert isinstance(record, SchemeRecord)
    layer = load_for(record.config, f"'config' of the scheme '{record.name}'", claim.source)()
    if not isinstance(layer, QLayerConfig):
        raise TypeError(f"{record.config} returns {layer!r}, not a QLayerConfig")
    formats = catalog.registries["formats"]

    def bits_of(name: str) -> float:
        return float(formats.get(name).bits)

    return {
        "weight": describe_spec(layer.weight),
        "input": describe_activation(layer.input_tensors),
        "output": describe_activation(layer.output_tensors),
        "effective_bits": effective_bits(layer.weight, bits_of),
        "needs_calibration": needs_calibration(layer),
    }


def _algorithm_facts(claim: Registered, catalog: Catalog) -> dict[str, Any]:
    assert isinstance(claim.record, AlgorithmRecord)
    return {"configuration_only": claim.record.processor is None}


def _template_facts(claim: Registered, catalog: Catalog) -> dict[str, Any]:
    assert isinstance(claim.record, TemplateRecord)
    if claim.record.architecture is None:  # a program registered this template without facts
        return {}
    architecture = load_for(claim.record.architecture, f"'architecture' of the template '{claim.record.name}'", claim.source)
    return {"decoder_blocks": architecture.decoder_blocks, "exclude_layers_name": list(architecture.exclude_layers_name)}


_OBJECTS = ("scheme", "template")
"""Fields of records whose values are objects of the running program, which have no JSON form."""
_DERIVED: dict[type[Record], Callable[[Registered, Catalog], dict[str, Any]]] = {
    SchemeRecord: _scheme_facts,
    AlgorithmRecord: _algorithm_facts,
    TemplateRecord: _template_facts,
}
"""Functions whose results a listing adds to the fields of a record. They load only what needs no torch."""
