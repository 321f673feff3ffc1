"""The plugin layer: hooks, records, and registries.

A plugin author needs `hookimpl`, the record classes, and the manual in `quark.plugins.hookspecs`. All other
code looks up records in a registry, as in ``schemes().get("fp8")``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quark.base.lazy import LazyRef
from quark.plugins import registries
from quark.plugins.api_version import API_VERSION
from quark.plugins.catalog import Catalog, emit, is_heard, listening, using
from quark.plugins.catalog import catalog as _catalog
from quark.plugins.discovery import Source
from quark.plugins.failures import PluginFailure, PluginWarning
from quark.plugins.hookspecs import QuarkHooks, hookimpl
from quark.plugins.model_records import GraphOpRecord, LayerTypeRecord, QuantModeRecord, TemplateRecord
from quark.plugins.options import Option, OptionNote
from quark.plugins.program_records import CommandRecord, DatasetRecord, ExporterRecord, MetricRecord, SelectorRecord
from quark.plugins.record_fields import CAPABILITIES
from quark.plugins.records import AlgorithmRecord, FormatRecord, ObserverRecord, Record, SchemeRecord
from quark.plugins.registries import *  # noqa: F403 - the registry of each kind
from quark.plugins.registry import Registry

if TYPE_CHECKING:
    from quark.plugins.events import (
        BatchFinished,
        BlockFinished,
        BlockStarted,
        Event,
        Exported,
        PhaseStarted,
        RunFailed,
        RunFinished,
        RunPlanned,
        RunStarted,
        Warned,
    )

__all__ = [
    "API_VERSION",
    "CAPABILITIES",
    "AlgorithmRecord",
    "BatchFinished",
    "BlockFinished",
    "BlockStarted",
    "Catalog",
    "CommandRecord",
    "DatasetRecord",
    "Event",
    "Exported",
    "ExporterRecord",
    "FormatRecord",
    "GraphOpRecord",
    "LayerTypeRecord",
    "LazyRef",
    "MetricRecord",
    "ObserverRecord",
    "Option",
    "OptionNote",
    "PhaseStarted",
    "PluginFailure",
    "PluginWarning",
    "QuantModeRecord",
    "QuarkHooks",
    "Record",
    "Registry",
    "RunFailed",
    "RunFinished",
    "RunPlanned",
    "RunStarted",
    "SchemeRecord",
    "SelectorRecord",
    "Source",
    "TemplateRecord",
    "Warned",
    "algorithms",
    "commands",
    "datasets",
    "documented_object",
    "emit",
    "exporters",
    "formats",
    "graph_ops",
    "hookimpl",
    "is_heard",
    "layer_types",
    "listening",
    "metrics",
    "observers",
    "quant_modes",
    "schemes",
    "selectors",
    "templates",
    "using",
]
__all__ += registries.__all__


def formats() -> registries.FormatRegistry:
    """Return the registry of number formats."""
    return _catalog().formats


def observers() -> registries.ObserverRegistry:
    """Return the registry of observers."""
    return _catalog().observers


def schemes() -> registries.SchemeRegistry:
    """Return the registry of schemes."""
    return _catalog().schemes


def algorithms() -> registries.AlgorithmRegistry:
    """Return the registry of algorithms."""
    return _catalog().algorithms


def templates() -> registries.TemplateRegistry:
    """Return the registry of templates, which are the records of model families."""
    return _catalog().templates


def exporters() -> registries.ExporterRegistry:
    """Return the registry of exporters."""
    return _catalog().exporters


def selectors() -> registries.SelectorRegistry:
    """Return the registry of selectors."""
    return _catalog().selectors


def layer_types() -> registries.LayerTypeRegistry:
    """Return the registry of layer types."""
    return _catalog().layer_types


def datasets() -> registries.DatasetRegistry:
    """Return the registry of datasets, which are sources of text for calibration and evaluation."""
    return _catalog().datasets


def metrics() -> registries.MetricRegistry:
    """Return the registry of metrics."""
    return _catalog().metrics


def quant_modes() -> registries.QuantModeRegistry:
    """Return the registry of quantization modes. It does not contain eager mode, which is built in."""
    return _catalog().quant_modes


def graph_ops() -> registries.GraphOpRegistry:
    """Return the registry of the operators that FX graph mode quantizes."""
    return _catalog().graph_ops


def commands() -> registries.CommandRegistry:
    """Return the registry of the commands of the program ``quark``."""
    return _catalog().commands


def documented_object(name: str) -> Any:
    """Return the object that a plugin provides under ``name``, a name of AMD Quark's public API.

    This function raises the same errors as `Catalog.exported`.
    """
    return _catalog().exported(name)


def __getattr__(name: str) -> Any:
    # The module with the classes of events is imported only when a run or a listener needs one.
    if name in __all__:
        from quark.plugins import events

        return getattr(events, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
