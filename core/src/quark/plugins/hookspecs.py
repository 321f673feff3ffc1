"""The hooks that a plugin may implement. These docstrings are the manual; their examples run as tests.

A plugin is a module (or an object) that a distribution names in the entry-point group ``quark``::

    [project.entry-points.quark]
    acme = "acme_quant.plugin"

and that implements any hooks of `QuarkHooks`, each marked with `hookimpl`. Keep that module light: every
listing imports it. Records point at other code by ``"module:attribute"``.

The module may state for which versions of the plugin API it was written. A core of another version then
leaves it out and says so::

    QUARK_API = (2, 2)  # lowest and highest; quark.plugins.API_VERSION is the version of the installed core

In the examples a comment names the file of each part; the others are in ``examples/acme_quant``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

from quark.plugins.model_hookspecs import PROJECT, ModelHooks, hookspec
from quark.plugins.program_records import CommandRecord, DatasetRecord, ExporterRecord, MetricRecord, SelectorRecord
from quark.plugins.records import AlgorithmRecord, FormatRecord, ObserverRecord, SchemeRecord

if TYPE_CHECKING:
    from quark.plugins.events import Event
    from quark.plugins.measuring import Moment

hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin as an implementation of the hook of the same name."""


class QuarkHooks(ModelHooks):
    """All hooks.

    **Provider hooks**, ``quark_register_*``, take no argument and return an iterable of records; a generator
    is the natural form. Each plugin's hook is called by itself, once per process, when something is first
    asked for:

    * Records are kept one by one: if a generator raises, its earlier records stay registered.
    * An exception loses no other plugin's records. It is warned about once (`quark.plugins.PluginWarning`),
      shown by ``quark plugins`` and by every "unknown name" message; ``QUARK_STRICT_PLUGINS=1`` raises it.
    * Order does not matter. If two distributions claim a name, asking for that name is an error, unless one
      record says ``replaces="other-distribution"``. Within one distribution, the first record of a name is
      kept and the second is a failure.
    * A plugin for another version of the plugin API (``QUARK_API``) is left out.

    pluggy calls the hooks of each plugin separately. Its features work within a plugin: several functions for
    one hook (``specname=``), their order (``tryfirst=``, ``trylast=``), and wrappers (``wrapper=True``),
    which get the results of only the plugin's own functions.

    **The event hook** is for progress bars and loggers; it can neither change a result nor stop a run. **The
    measuring hook** computes figures from tensors for the report; it changes nothing but the report.
    """

    @hookspec
    def quark_register_formats(self) -> Iterable[FormatRecord]:  # type: ignore[empty-body]
        """Return the number formats of a plugin: element codes ↔ values, range, rounding, packing.

        Each record points at a `quark.numbers.NumberFormat` value with the same name and number of bits.

        Example::

            # acme_quant/plugin.py
            from quark.plugins import FormatRecord, hookimpl

            @hookimpl
            def quark_register_formats():
                yield FormatRecord(
                    name="acme_nf3",
                    bits=3,
                    summary="eight normal quantiles in [-1, 1], 0 among them",
                    format="acme_quant.codebook:ACME_NF3",
                )
        """

    @hookspec
    def quark_register_observers(self) -> Iterable[ObserverRecord]:  # type: ignore[empty-body]
        """Return the observers of a plugin: they turn the values of a tensor into the range of its scale.

        Each record points at a `quark.numbers.Observer` class; configurations name it by ``class_name``.

        Example::

            # acme_quant/plugin.py
            from quark.plugins import ObserverRecord, hookimpl

            @hookimpl
            def quark_register_observers():
                yield ObserverRecord(
                    name="acme_rms",
                    class_name="AcmeRmsObserver",
                    summary="a multiple of the root mean square",
                    observer="acme_quant.observer:AcmeRmsObserver",
                )
        """

    @hookspec
    def quark_register_schemes(self) -> Iterable[SchemeRecord]:  # type: ignore[empty-body]
        """Return the schemes of a plugin: names for layer configurations.

        Each record points at a function that builds a fresh `quark.config.layer.QLayerConfig` and imports no
        torch. Its keyword arguments are the scheme's options (``--scheme-option group_size=32``).

        Example::

            # acme_quant/plugin.py
            from quark.plugins import SchemeRecord, hookimpl

            @hookimpl
            def quark_register_schemes():
                yield SchemeRecord(name="acme_w8", summary="INT8, in groups", config="acme_quant.w8:acme_w8")

            # acme_quant/w8.py
            from quark.config.layer import QLayerConfig
            from quark.config.tensor import QTensorConfig

            def acme_w8(group_size: int = 64) -> QLayerConfig:
                groups = {"qscheme": "per_group", "ch_axis": -1, "group_size": group_size}
                ranges = {"symmetric": True, "is_dynamic": False, "observer_cls": "PerGroupMinMaxObserver"}
                return QLayerConfig(weight=QTensorConfig(dtype="int8", **groups, **ranges))
        """

    @hookspec
    def quark_register_algorithms(self) -> Iterable[AlgorithmRecord]:  # type: ignore[empty-body]
        """Return the algorithms of a plugin: transforms, roundings and block tunings.

        Each record points at two classes. The class of the settings is a `quark.config.algorithm.AlgoConfig`,
        whose fields are the algorithm's options (``--algorithm-option acme_weighted.ratios=...``). The other
        class implements the algorithm. The record of a transform also states its role (``role=``) and its
        place among the other transforms of a run (``before=``, ``after=``).

        Example::

            # acme_quant/plugin.py
            from quark.plugins import AlgorithmRecord, hookimpl

            @hookimpl
            def quark_register_algorithms():
                yield AlgorithmRecord(
                    name="acme_weighted",
                    kind="rounding",
                    summary="scales searched by the mean square of each input channel, then round-to-nearest",
                    config="acme_quant.weighted_config:AcmeWeightedConfig",
                    processor="acme_quant.weighted:AcmeWeighted",
                    capabilities={"calibration"},
                )
        """

    @hookspec
    def quark_register_exporters(self) -> Iterable[ExporterRecord]:  # type: ignore[empty-body]
        """Return the checkpoint layouts of a plugin.

        Each record points at a class that writes the layout: a `quark.checkpoint.Exporter`, or, for
        safetensors files, a `quark.checkpoint.CheckpointExporter`, which streams, resumes and shares runs.
        Keyword arguments of the class are the exporter's options (``--exporter-option level=9``).

        Further classes handle the checkpoints that ``quant_methods`` names: ``reader``
        (`quark.checkpoint.LayoutReader`) makes models, ``dequantizer`` (`quark.checkpoint.Dequantizer`) makes
        sources of a run, and ``inspector`` (`quark.checkpoint.inspection.Inspector`) says which runtimes load
        them (``quark inspect``).

        Example::

            # acme_quant/plugin.py
            from quark.plugins import ExporterRecord, hookimpl

            @hookimpl
            def quark_register_exporters():
                yield ExporterRecord(
                    name="acme_names", summary="names of all tensors", exporter="acme_quant.names:Names"
                )

            # acme_quant/names.py
            from quark.checkpoint import Exporter

            class Names(Exporter):
                def export(self, content, out, options):
                    (out / "names.txt").write_text("\\n".join(content.model.state_dict()))
        """

    @hookspec
    def quark_register_selectors(self) -> Iterable[SelectorRecord]:  # type: ignore[empty-body]
        """Return the selectors of a plugin: classes that choose a scheme for each group of layers.

        Each record points at a class with the protocol `quark_workbench.mixed_precision.SchemeSelector`; its
        keyword arguments are the selector's options (``--selector-option KEY=VALUE``).
        ``quark quantize --mixed`` gives it groups, candidates, sizes and a budget, and the selector chooses.

        Example::

            # acme_quant/plugin.py
            from quark.plugins import SelectorRecord, hookimpl

            @hookimpl
            def quark_register_selectors():
                yield SelectorRecord(
                    name="acme_ends", summary="last layers first", selector="acme_quant.ends:LastFirst"
                )

            # acme_quant/ends.py
            from quark_workbench.mixed_precision import Selection

            class LastFirst:
                def select(self, problem):
                    choices = {name: min(sizes, key=sizes.get) for name, sizes in problem.sizes.items()}
                    most = problem.largest if problem.most_bytes is None else problem.most_bytes
                    for name, sizes in reversed(list(problem.sizes.items())):
                        larger = choices | {name: max(sizes, key=sizes.get)}
                        if problem.bytes_of(larger) <= most:
                            choices = larger
                    return Selection(choices)
        """

    @hookspec
    def quark_register_datasets(self) -> Iterable[DatasetRecord]:  # type: ignore[empty-body]
        """Return the sources of text of a plugin, for calibration and evaluation.

        Each record points at a function that yields samples: texts, or chats, which are lists of messages
        with ``role`` and ``content``. Its keyword arguments are the source's options
        (``--calib acme_tickets --calib-option closed=true``). If the record has ``suffixes``, the function
        gets the ``path`` of a file, and ``--calib tickets.acme`` finds it by the ending of the name.

        Example::

            # acme_quant/plugin.py
            from quark.plugins import DatasetRecord, hookimpl

            @hookimpl
            def quark_register_datasets():
                yield DatasetRecord(
                    name="acme_tickets", summary="help-desk tickets", samples="acme_quant.tickets:tickets"
                )

            # acme_quant/tickets.py
            def tickets(closed: bool = True):
                yield "The printer is on fire."
                answer = "It was." if closed else "It is."
                yield [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": answer}]
        """

    @hookspec
    def quark_register_metrics(self) -> Iterable[MetricRecord]:  # type: ignore[empty-body]
        """Return the metrics of a plugin: numbers for each token, for ``quark evaluate --metric NAME``.

        Each record points at a function of log-probabilities; its mean and standard error are reported.

        Example::

            # acme_quant/plugin.py
            from quark.plugins import MetricRecord, hookimpl

            @hookimpl
            def quark_register_metrics():
                yield MetricRecord(
                    name="acme_margin", summary="best log-probability", metric="acme_quant.margin:margin"
                )

            # acme_quant/margin.py
            def margin(log_q, targets, log_p=None):
                return log_q.amax(-1)
        """

    @hookspec
    def quark_register_commands(self) -> Iterable[CommandRecord]:  # type: ignore[empty-body]
        """Return the commands of a plugin, such as ``quark acme-tensors DIR``.

        Each record points at a function, or at a ``typer.Typer`` with its own commands, which is loaded when
        the command is called. An error that it raises becomes one sentence on stderr and exit code 2; raise
        errors of `quark.errors` for that.

        Example::

            # acme_quant/plugin.py
            from quark.plugins import CommandRecord, hookimpl

            @hookimpl
            def quark_register_commands():
                yield CommandRecord(
                    name="acme-tensors",
                    summary="Print the names of the tensors of a checkpoint.",
                    command="acme_quant.tensors:tensors",
                )

            # acme_quant/tensors.py
            from pathlib import Path

            def tensors(directory: Path, limit: int = 10) -> None:
                from safetensors import safe_open  # not above: `quark acme-tensors --help` does not need it

                for file in sorted(directory.glob("*.safetensors")):
                    with safe_open(file, "pt") as opened:
                        print(*list(opened.keys())[:limit], sep="\\n")
        """

    @hookspec
    def quark_on_event(self, event: Event) -> None:
        """Receive an event of a run: it started, a block is finished, something was exported, it failed.

        It is called in the process that works (the first, if there are several), between two pieces of work.
        Return quickly, and write nothing to stdout, which may hold the answer of ``--json``. An exception is
        logged once and ignored.

        Args:
            event: An instance of a subclass of `Event`, with a ``name``. Ignore events of other names,
                because later versions may add some. An implementation may leave the argument out.

        Example::

            # acme_quant/plugin.py
            import logging

            from quark.plugins import hookimpl

            @hookimpl
            def quark_on_event(event):
                if event.name == "block_finished" and event.seconds_left is not None:
                    left = f"{event.block} of {event.total}, {event.seconds_left:.0f} s left"
                    logging.getLogger("acme_quant").info(left)
        """

    @hookspec
    def quark_measure(self, moment: Moment) -> None:
        """Measure tensors of a run while they are in memory, and add figures to its report.

        It is called in every process, also for runs inside other runs. The run waits for it, so it makes the
        run longer. An exception is logged once and ignored.

        Args:
            moment: An instance of a subclass of `quark.plugins.measuring.Moment`. Ignore moments that you do
                not know, because later versions may add some.

        Example::

            # acme_quant/plugin.py
            from quark.plugins import hookimpl
            from quark.plugins.measuring import LayersRounded

            @hookimpl
            def quark_measure(moment):
                if isinstance(moment, LayersRounded):
                    for name in moment.layers:
                        largest = moment.model.get_submodule(name).weight.detach().abs().max()
                        moment.report.weights.setdefault(name, {})["acme_largest"] = float(largest)
        """
