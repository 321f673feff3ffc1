"""The kinds of things that plugins provide: one row each, for hooks, registries, listings, messages."""

from __future__ import annotations

import attrs

from quark.plugins.discovery import CORE
from quark.plugins.model_records import GraphOpRecord, LayerTypeRecord, QuantModeRecord, TemplateRecord
from quark.plugins.program_records import CommandRecord, DatasetRecord, ExporterRecord, MetricRecord, SelectorRecord
from quark.plugins.records import AlgorithmRecord, FormatRecord, ObserverRecord, Record, SchemeRecord

__all__ = ["BUILT_IN", "KINDS", "Kind"]


@attrs.frozen
class Kind:
    """One kind.

    Attributes:
        name: In the singular, as messages say it: ``"scheme"``.
        plural: Name of its registry and of its listing: ``"schemes"``.
        record: Class that its hook yields.
        distribution: Which distribution brings the built-in ones, for messages.
    """

    name: str
    plural: str
    record: type[Record]
    distribution: str

    @property
    def hook(self) -> str:
        """Name of the provider hook."""
        return f"quark_register_{self.plural}"


KINDS = (
    Kind("format", "formats", FormatRecord, "quark-schemes"),
    Kind("observer", "observers", ObserverRecord, "quark-schemes"),
    Kind("scheme", "schemes", SchemeRecord, "quark-schemes"),
    Kind("algorithm", "algorithms", AlgorithmRecord, "quark-algos"),
    Kind("template", "templates", TemplateRecord, "quark-templates"),
    Kind("exporter", "exporters", ExporterRecord, "quark-exporters"),
    Kind("selector", "selectors", SelectorRecord, "quark-workbench"),
    Kind("layer type", "layer_types", LayerTypeRecord, CORE),
    Kind("dataset", "datasets", DatasetRecord, "quark-workbench"),
    Kind("metric", "metrics", MetricRecord, "quark-workbench"),
    Kind("quantization mode", "quant_modes", QuantModeRecord, "quark-graph"),
    Kind("graph op", "graph_ops", GraphOpRecord, "quark-graph"),
    Kind("command", "commands", CommandRecord, "quark-workbench"),
)
BUILT_IN = tuple(dict.fromkeys(kind.distribution for kind in KINDS if kind.distribution != CORE))
"""Distributions that a complete installation has beside the core."""
