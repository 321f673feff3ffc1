"""The kinds of plugins that can be written, a row each; templates are in the folder of a kind's name."""

from __future__ import annotations

import attrs

from quark.plugins.kinds import KINDS, Kind

__all__ = ["PLUGIN_KINDS", "PluginKind"]


@attrs.frozen
class PluginKind:
    """One kind.

    Attributes:
        name: As the conformance suite calls it; with ``-`` for ``_`` the option of the command line.
        registry: In which registry its records are, such as ``"algorithms"``.
        ending: What follows the prefix in the name of the record that is written: ``"w4a8"`` in
            ``"acme_w4a8"``.
        summary: What is written, for ``--help``.
        requires: What the code imports or names, beside quark-core: requirements without versions.
    """

    name: str
    registry: str
    ending: str
    summary: str
    requires: tuple[str, ...] = ()

    @property
    def option(self) -> str:
        """Return the option of the command line that chooses it."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def hooked(self) -> Kind:
        """Return the hook and the class of its records."""
        return next(kind for kind in KINDS if kind.plural == self.registry)

    @property
    def conformance(self) -> str:
        """Return the class of `quark_devkit` whose subclasses test a plugin of this kind."""
        return f"{self.name.title().replace('_', '')}Conformance"


PLUGIN_KINDS = (
    PluginKind("scheme", "schemes", "w4a8", "INT4 weights in groups, INT8 inputs by token, from existing formats", ("quark-schemes",)),
    PluginKind("format", "formats", "int3", "a number format: whole numbers in three bits, and their packing", ("torch",)),
    PluginKind("observer", "observers", "quantile", "an observer: the range is a quantile of the magnitudes", ("torch",)),
    PluginKind("rounding", "algorithms", "clipped", "a rounding: it narrows ranges where the outputs get better", ("attrs", "torch")),
    PluginKind("transform", "algorithms", "balanced", "a transform: scale moved inside MLPs, the function kept", ("attrs", "torch")),
    PluginKind("block_tuning", "algorithms", "nudged", "a tuning: norms resized where a rounded block gains by it", ("attrs", "torch")),
    PluginKind("template", "templates", "lm", "a model family: its class, and the facts about its structure", ("torch", "transformers")),
    PluginKind("layout", "exporters", "box", "a checkpoint layout: its exporter and its reader", ("safetensors", "torch")),
    PluginKind(
        "selector", "selectors", "ends", "a selector of schemes: larger ones for the first and the last layers", ("quark-workbench",)
    ),
    PluginKind("layer_type", "layer_types", "gated", "a linear layer with a gain for each output", ("torch",)),
    PluginKind("dataset", "datasets", "dialogs", "a source of calibration text: files of dialogs, each a chat"),
    PluginKind("metric", "metrics", "rank", "a metric of evaluations: the rank of the right token", ("torch",)),
    PluginKind("graph_op", "graph_ops", "mish", "an operator of FX graph mode: mish, which quark-core leaves float", ("torch",)),
)
