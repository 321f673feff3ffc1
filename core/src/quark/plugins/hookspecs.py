"""The hooks of quark: what a plugin may implement. The docstrings here are the manual.

A plugin is a module (or an object) that a distribution names in the entry-point group ``quark``::

    [project.entry-points.quark]
    acme = "acme_quant.plugin"

and that implements any of the hooks of `QuarkHooks`, each marked with `hookimpl`::

    from quark.plugins import SchemeRecord, hookimpl

    @hookimpl
    def quark_register_schemes():
        yield SchemeRecord(name="acme_int3", summary="3-bit weights", config="acme_quant.schemes:int3")

Keep that module light: it is imported whenever anything is listed. Records point at the rest by ``"module:attribute"``.
"""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from quark.plugins.events import Event
from quark.plugins.records import (
    AlgorithmRecord,
    ExporterRecord,
    FormatRecord,
    LayerTypeRecord,
    ObserverRecord,
    SchemeRecord,
    TemplateRecord,
)

PROJECT = "quark"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin as an implementation of the hook of the same name."""


class QuarkHooks:
    """All hooks.

    **Provider hooks**, ``quark_register_*``, take no argument and return an iterable of records; a generator is the natural form.
    Each plugin's hook is called by itself, once per process, when something is first asked for:

    * Records are kept one by one. Where a generator raises, what it yielded before stays registered and the failure is recorded.
    * An exception loses nobody else's records. It is warned about once (`quark.plugins.PluginWarning`), shown by ``quark plugins`` and by
      every "unknown name" message; with ``QUARK_STRICT_PLUGINS=1`` it is raised.
    * Order does not matter: a name that two distributions claim is an error when that name is asked for, unless one record says
      ``replaces="other-distribution"``. Within one distribution the first record of a name stands, the second is a failure.
    * Wrappers (``@hookimpl(wrapper=True)``) are refused: there is nothing around a call that concerns one plugin only.

    **The event hook** is for progress bars and loggers; it can neither change a result nor stop a run, not by sys.exit() either.
    """

    @hookspec
    def quark_register_formats(self) -> Iterable[FormatRecord]:  # type: ignore[empty-body]
        """Number formats: element codes ↔ values, range, rounding, packing. Each record points at a `quark.quantizers.NumberFormat`."""

    @hookspec
    def quark_register_observers(self) -> Iterable[ObserverRecord]:  # type: ignore[empty-body]
        """Observers: how the data seen become a range. Each record points at a `quark.quantizers.Observer` class."""

    @hookspec
    def quark_register_schemes(self) -> Iterable[SchemeRecord]:  # type: ignore[empty-body]
        """Schemes: a name for a layer configuration. Each record points at a torch-free function that builds a fresh `QLayerConfig`."""

    @hookspec
    def quark_register_algorithms(self) -> Iterable[AlgorithmRecord]:  # type: ignore[empty-body]
        """Algorithms: a transform or a rounding. Each record points at its configuration class and at the class that does the work."""

    @hookspec
    def quark_register_templates(self) -> Iterable[TemplateRecord]:  # type: ignore[empty-body]
        """Model families, named as ``config.model_type``. Each record points at an `Architecture`.

        The record of a family that transformers does not know also names the module that registers its model class (``modeling``).
        """

    @hookspec
    def quark_register_exporters(self) -> Iterable[ExporterRecord]:  # type: ignore[empty-body]
        """Checkpoint layouts. Each record points at two classes: one with the protocol `quark.checkpoint.Exporter` that writes it, and one
        with the protocol `quark.checkpoint.LayoutReader` that reads it::

            @hookimpl
            def quark_register_exporters():
                yield ExporterRecord(
                    name="acme_box",
                    exporter="acme_quant.box:BoxExporter",
                    reader="acme_quant.box:BoxReader",
                    quant_methods=("acme-box",),
                )
        """

    @hookspec
    def quark_register_layer_types(self) -> Iterable[LayerTypeRecord]:  # type: ignore[empty-body]
        """Layer types: which quantized class a float layer becomes. Each record names both classes::

            @hookimpl
            def quark_register_layer_types():
                yield LayerTypeRecord(
                    name="acme_gated", layer="acme_quant.layers:Gated", quantized="acme_quant.layers:QuantGated", planned_as="linear"
                )

        Core registers its own through the same hook (`quark.plugins.core_plugin`).
        """

    @hookspec
    def quark_on_event(self, event: Event) -> None:
        """Hear that something happened, such as ``block_finished``.

        Called in the process that works, between two pieces of work: return quickly. The first exception is logged, others are forgotten.

        Args:
            event: What happened; see `Event`. An implementation may leave the argument out.
        """
