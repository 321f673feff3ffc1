"""The hooks that a plugin may implement. These docstrings are the manual. Tests run their examples.

A plugin is a module (or an object) that implements one or more hooks of `QuarkHooks`. Each implementation is
marked with `hookimpl`. The distribution names the module in the entry-point group ``quark``::

    [project.entry-points.quark]
    acme = "acme_quant.plugin"

Import little in that module, because every command that lists plugins imports it. Records point at other
code by a string ``"module:attribute"``.

The module may state for which versions of the plugin API it was written. If the version of the installed core
is not among them, quark does not use the plugin and warns about this::

    QUARK_API = (2, 2)  # lowest and highest; quark.plugins.API_VERSION is the version of the installed core

In the examples, a comment names the file that contains the code below it. Files that an example names but
does not show are in ``examples/acme_quant``.
"""

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
    """All hooks that a plugin may implement.

    **Provider hooks** have names that begin with ``quark_register_``. They have no parameters and return an
    iterable of records; most plugins write them as generators. quark calls the hooks of each plugin
    separately, once per process, when the program first needs a record of any plugin:

    * Records are registered one by one. If a generator raises, the records that it yielded before stay
      registered.
    * If a hook raises, the records of other plugins stay registered. quark warns once about the exception
      (`quark.plugins.PluginWarning`). ``quark plugins`` and every message about an unknown name also show it.
      If ``QUARK_STRICT_PLUGINS=1`` is set, quark raises `quark.errors.PluginError` instead.
    * The order of plugins does not matter. If two distributions register the same name, a lookup of that name
      raises an error, unless one record says ``replaces="other-distribution"``. If one distribution registers
      a name twice, the first record is used, and the second is recorded as a failure.
    * If the plugin was written for other versions of the plugin API (``QUARK_API``), none of its hooks is
      called.

    quark calls the hooks with pluggy. Within one plugin, the features of pluggy work: several functions for
    one hook (``specname=``), their order (``tryfirst=``, ``trylast=``), and wrappers (``wrapper=True``). A
    wrapper gets the results of functions of the same plugin only.

    **The event hook** is for progress bars and loggers. It can neither change a result nor stop a run.

    **The measuring hook** computes figures from tensors for the report of a run. It can change the report
    only.
    """

    @hookspec
    def quark_register_formats(self) -> Iterable[FormatRecord]:  # type: ignore[empty-body]
        """Return the number formats of a plugin.

        A number format defines the codes of elements, the values of the codes, the range, the rounding and
        the packing. Each record points at an instance of `quark.numbers.NumberFormat` that has the same name
        and number of bits as the record.

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
        """Return the observers of a plugin. An observer finds the range of values that a scale must cover.

        Each record points at a subclass of `quark.numbers.Observer`. Configurations refer to the subclass by
        the record's ``class_name``.

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
        """Return the schemes of a plugin. A scheme is a layer configuration that has a name.

        Each record points at a function that returns a new `quark.config.layer.QLayerConfig`. The function
        must not import torch. Its keyword arguments are the options of the scheme
        (``--scheme-option group_size=32``).

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
        """Return the algorithms of a plugin: transforms, roundings, block tunings and branches.

        Each record points at two classes. ``config`` is the class of the settings, a subclass of
        `quark.config.algorithm.AlgoConfig`. Its fields are the options of the algorithm
        (``--algorithm-option acme_weighted.ratios=...``). ``processor`` is the class that implements the
        algorithm. The record of a transform also states the role of the transform (``role=``), and which
        other transforms must run after or before it (``before=``, ``after=``).

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

        Each record points at a class that writes the layout (``exporter``), a `quark.checkpoint.Exporter`. A
        layout of safetensors files can use the subclass `quark.checkpoint.CheckpointExporter`. With it, a run
        can write one decoder block at a time, resume after an interrupt, and use several processes. Keyword
        arguments of the class are the exporter's options (``--exporter-option level=9``).

        The record can also name classes for existing checkpoints whose ``quant_method`` is one of
        ``quant_methods``. ``reader`` (`quark.checkpoint.LayoutReader`) loads such a checkpoint as a model.
        ``dequantizer`` (`quark.checkpoint.Dequantizer`) returns its float tensors, so that it can be
        quantized again. ``inspector`` (`quark.checkpoint.inspection.Inspector`) tells ``quark inspect`` which
        runtimes load it.

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
        """Return the selectors of a plugin. A selector chooses a scheme for each group of layers.

        Each record points at a class with the protocol `quark_workbench.mixed_precision.SchemeSelector`. The
        keyword arguments of the class are the selector's options (``--selector-option KEY=VALUE``).
        ``quark quantize --mixed`` calls ``select`` with a ``problem``: the groups of layers, the candidate
        schemes, the size of each group in each scheme, and a budget. ``select`` returns its choice.

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

        Each record points at a function that yields samples. A sample is a text or a chat. A chat is a list
        of messages, which are dictionaries with the keys ``role`` and ``content``. The keyword arguments of
        the function are the options of the source (``--calib acme_tickets --calib-option closed=true``). A
        source that reads files has ``suffixes`` in its record. quark chooses such a source by the ending of
        the file name (``--calib tickets.acme``) and passes the file's path as the argument ``path``.

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
        """Return the metrics of a plugin, for ``quark evaluate --metric NAME``.

        Each record points at a function that computes one number for each token from log-probabilities.
        ``quark evaluate`` prints the mean of the numbers and its standard error.

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

        Each record points at a function, or at a ``typer.Typer`` that has subcommands. quark imports the
        function when a user calls the command. If the function raises an error of `quark.errors`, the program
        prints the message on stderr and exits with code 2.

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
        """Receive an event of a run. For example, a run has started, finished a block, or failed.

        quark calls this hook in the process that does the work, between two steps of the work. If several
        processes share the run, only the first one calls it. Return quickly, because the run waits. Write
        nothing to stdout, because the program may print JSON there (``--json``). If the hook raises, quark
        logs the first exception and ignores all of them.

        Args:
            event: An instance of a subclass of `Event`, with a ``name``. Ignore events whose name you do not
                handle, because later versions may add events. An implementation may omit this parameter.

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
        """Measure tensors of a run while they are in memory, and add figures to the report of the run.

        quark calls this hook in every process, also for a run that is part of another run. The run waits
        until the hook returns. Exceptions of the hook do not stop the run. quark logs only the first one.

        Args:
            moment: An instance of a subclass of `quark.plugins.measuring.Moment`. Ignore moments of a class
                that you do not know, because later versions may add classes.

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
