"""The kinds of things that plugins provide, and the registry of each kind.

A registry has a typed ``load_*`` method for each field of its records that is a reference. The method accepts
the same names as `Registry.get` and raises the same errors. It also raises UnsupportedError if the field is
None, and PluginError if the reference cannot be loaded or leads to another kind of object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quark.errors import AmbiguousNameError
from quark.plugins.discovery import CORE
from quark.plugins.model_records import GraphOpRecord, LayerTypeRecord, QuantModeRecord, TemplateRecord
from quark.plugins.program_records import CommandRecord, DatasetRecord, ExporterRecord, MetricRecord, SelectorRecord
from quark.plugins.records import AlgorithmRecord, FormatRecord, ObserverRecord, SchemeRecord
from quark.plugins.registry import Kind, Registry

if TYPE_CHECKING:
    from torch import Tensor, nn

    from quark.algorithms import Rounding, Transform
    from quark.checkpoint import Exporter, LayoutReader
    from quark.checkpoint.inspection import Inspector
    from quark.checkpoint.restorers import Restorer
    from quark.config.algorithm import AlgoConfig
    from quark.config.architecture import Architecture
    from quark.config.layer import QLayerConfig, TensorSpec
    from quark.config.model import QConfig
    from quark.config.tensor import QTensorConfig
    from quark.models.hf.dequantizer import Dequantizer
    from quark.models.layers import QuantizedLayer
    from quark.numbers import NumberFormat, Observer

__all__ = [
    "AlgorithmRegistry",
    "CommandRegistry",
    "DatasetRegistry",
    "ExporterRegistry",
    "FormatRegistry",
    "GraphOpRegistry",
    "LayerTypeRegistry",
    "MetricRegistry",
    "ObserverRegistry",
    "QuantModeRegistry",
    "SchemeRegistry",
    "SelectorRegistry",
    "TemplateRegistry",
]


class FormatRegistry(Registry[FormatRecord]):
    """Number formats by name."""

    def load_format(self, name: str) -> NumberFormat:
        """Return the number format with the name ``name``."""
        return self._load(name, "format")


class ObserverRegistry(Registry[ObserverRecord]):
    """Observers by name."""

    def load_observer(self, name: str) -> type[Observer]:
        """Return the observer class with the name ``name``."""
        return self._load(name, "observer")


class SchemeRegistry(Registry[SchemeRecord]):
    """Schemes by name."""

    def load_config(self, name: str) -> Callable[..., QLayerConfig]:
        """Return the function that builds the scheme's `QLayerConfig`.

        The keyword arguments of the function are the options of the scheme.
        """
        return self._load(name, "config")

    def load_kv_cache(self, name: str) -> Callable[[], TensorSpec]:
        """Return the function that builds the configuration of a KV cache in this scheme."""
        return self._load(name, "kv_cache")

    def load_attention(self, name: str) -> Callable[[], QTensorConfig]:
        """Return the function that builds the `QTensorConfig` of attention probabilities and queries."""
        return self._load(name, "attention")


class AlgorithmRegistry(Registry[AlgorithmRecord]):
    """Algorithms by name."""

    def load_config(self, name: str) -> type[AlgoConfig]:
        """Return the class of the algorithm's settings."""
        return self._load(name, "config")

    def load_processor(self, name: str) -> Callable[..., Rounding | Transform]:
        """Return the class or function that creates a rounding or a transform from the settings."""
        return self._load(name, "processor")

    def load_restorer(self, name: str) -> Callable[[Any], Restorer]:
        """Return the class that restores the modules that the algorithm added to a model.

        The class is created with the algorithm's settings.
        """
        return self._load(name, "restorer")


class TemplateRegistry(Registry[TemplateRecord]):
    """Model families by ``config.model_type``."""

    def load_architecture(self, name: str) -> Architecture:
        """Return the facts about a model family."""
        return self._load(name, "architecture")

    def find_architecture(self, name: str) -> Architecture | None:
        """Return the facts about a model family, like `load_architecture`.

        Return None if no record has the name ``name``, or if the record states no facts.
        """
        return None if name not in self or self.get(name).architecture is None else self.load_architecture(name)


class ExporterRegistry(Registry[ExporterRecord]):
    """Exporters by name."""

    def load_exporter(self, name: str) -> Callable[..., Exporter]:
        """Return the class or function that creates the exporter from its options."""
        return self._load(name, "exporter")

    def load_reader(self, name: str) -> Callable[[], LayoutReader]:
        """Return the class or function that creates the reader of checkpoints in this layout."""
        return self._load(name, "reader")

    def load_dequantizer(self, name: str) -> Callable[[], Dequantizer]:
        """Return the class or function that creates the dequantizer of checkpoints in this layout."""
        return self._load(name, "dequantizer")

    def load_inspector(self, name: str) -> Callable[[], Inspector]:
        """Return the class or function that creates the inspector of checkpoints in this layout."""
        return self._load(name, "inspector")

    def fitting(self, block: Mapping[str, Any]) -> list[str]:
        """Return the names of the layouts that fit ``block``, a checkpoint's ``quantization_config``.

        If layouts with different numbers of marks fit, only those with the most marks are returned.
        """
        fitting = {name: record for name in self.names() if (record := self.get(name)).fits(block)}
        most = max((len(record.marks) for record in fitting.values()), default=0)
        return [name for name, record in fitting.items() if len(record.marks) == most]

    def fitting_one(self, block: Mapping[str, Any], part: Literal["reader", "dequantizer"], path: Path) -> str | None:
        """Return the name of the layout that fits ``block`` and has a class for ``part``. Return None if no
        layout does.

        Args:
            block: The ``quantization_config`` of a checkpoint.
            part: Field of the record that must not be None.
            path: File or directory of the checkpoint. Only messages show it.

        Raises:
            AmbiguousNameError: (a ValueError) Several layouts fit with equally many marks.
        """
        names = [name for name in self.fitting(block) if getattr(self.get(name), part) is not None]
        if len(names) > 1:
            who = " and ".join(f"'{name}' of {self.source(name)}" for name in names)
            raise AmbiguousNameError(
                f"several layouts fit '{path}': {who}. Leave one plugin out with QUARK_DISABLED_PLUGINS, or distinguish the layouts "
                "with ExporterRecord(marks=...)"
            )
        return names[0] if names else None

    def methods_with(self, part: Literal["reader", "dequantizer"]) -> str:
        """Return a text that lists the ``quant_method`` values of the layouts whose ``part`` is not None."""
        methods = sorted({method for record in self if getattr(record, part) is not None for method in record.quant_methods})
        return ", ".join(map(repr, methods)) or "none"


class SelectorRegistry(Registry[SelectorRecord]):
    """Selectors by name."""

    def load_selector(self, name: str) -> Callable[..., Any]:
        """Return the class or function that creates the selector from its options."""
        return self._load(name, "selector")


class LayerTypeRegistry(Registry[LayerTypeRecord]):
    """Layer types by name."""

    def load_layer(self, name: str) -> type[nn.Module]:
        """Return the class of float layers."""
        return self._load(name, "layer")

    def load_quantized(self, name: str) -> type[QuantizedLayer]:
        """Return the class that replaces these float layers in a quantized model."""
        return self._load(name, "quantized")


class DatasetRegistry(Registry[DatasetRecord]):
    """Sources of text by name."""

    def load_samples(self, name: str) -> Callable[..., Iterable[object]]:
        """Return the function that yields the samples of a source."""
        return self._load(name, "samples")

    def load_example(self, name: str) -> Callable[..., None]:
        """Return the function that writes a small example of the files that the source reads."""
        return self._load(name, "example")


class MetricRegistry(Registry[MetricRecord]):
    """Metrics by name."""

    def load_metric(self, name: str) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
        """Return the function that computes the metric for each token."""
        return self._load(name, "metric")


class QuantModeRegistry(Registry[QuantModeRecord]):
    """Quantization modes by name."""

    def load_plan(self, name: str) -> Callable[[nn.Module, QConfig], object]:
        """Return the function that plans the quantization of a model."""
        return self._load(name, "plan")

    def load_quantize(self, name: str) -> Callable[[nn.Module, QConfig, Any], nn.Module]:
        """Return the function that quantizes a model."""
        return self._load(name, "quantize")


class GraphOpRegistry(Registry[GraphOpRecord]):
    """Operators of FX graph mode by name."""

    def load_example(self, name: str) -> Callable[[str], tuple[nn.Module, tuple[object, ...]]]:
        """Return the function that builds an example of the operator.

        The function returns a module that has the operator, and a tuple of arguments for the module.
        """
        return self._load(name, "example")


class CommandRegistry(Registry[CommandRecord]):
    """Commands of the program by name."""

    def load_command(self, name: str) -> Callable[..., object]:
        """Return the function of the command, or its ``typer.Typer``."""
        return self._load(name, "command")

    def in_order(self) -> list[str]:
        """Return the names in the order in which plugins register them."""
        order = [entry.record.name for entry in self._entries]
        return sorted(self.names(), key=lambda name: order.index(name.rpartition(":")[2]))


KINDS = (
    Kind("format", "formats", FormatRecord, FormatRegistry, "quark-schemes"),
    Kind("observer", "observers", ObserverRecord, ObserverRegistry, "quark-schemes"),
    Kind("scheme", "schemes", SchemeRecord, SchemeRegistry, "quark-schemes"),
    Kind("algorithm", "algorithms", AlgorithmRecord, AlgorithmRegistry, "quark-algos"),
    Kind("template", "templates", TemplateRecord, TemplateRegistry, "quark-templates"),
    Kind("exporter", "exporters", ExporterRecord, ExporterRegistry, "quark-exporters"),
    Kind("selector", "selectors", SelectorRecord, SelectorRegistry, "quark-workbench"),
    Kind("layer type", "layer_types", LayerTypeRecord, LayerTypeRegistry, CORE),
    Kind("dataset", "datasets", DatasetRecord, DatasetRegistry, "quark-workbench"),
    Kind("metric", "metrics", MetricRecord, MetricRegistry, "quark-workbench"),
    Kind("quantization mode", "quant_modes", QuantModeRecord, QuantModeRegistry, "quark-graph"),
    Kind("graph op", "graph_ops", GraphOpRecord, GraphOpRegistry, "quark-graph"),
    Kind("command", "commands", CommandRecord, CommandRegistry, "quark-workbench"),
)
BUILT_IN = tuple(dict.fromkeys(kind.distribution for kind in KINDS if kind.distribution != CORE))
"""The distributions that a complete installation has in addition to quark-core."""
