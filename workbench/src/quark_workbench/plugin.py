"""The plugin of quark-workbench: records of commands, data sources, metrics and a selector, and two hooks.

The hooks show the progress of runs, and measure layers for reports. This module imports no slow package.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quark.base.lazy import LazyRef
from quark.plugins import CommandRecord, DatasetRecord, MetricRecord, SelectorRecord, hookimpl

if TYPE_CHECKING:
    from quark.plugins import Event
    from quark.plugins.measuring import Moment

__all__ = [
    "QUARK_API",
    "quark_measure",
    "quark_on_event",
    "quark_register_commands",
    "quark_register_datasets",
    "quark_register_metrics",
    "quark_register_selectors",
]

QUARK_API = (2, 2)

_MEASURE = LazyRef("quark_workbench.report.measured:measure")


@hookimpl
def quark_register_commands() -> Iterator[CommandRecord]:
    """Yield the commands that work on models and checkpoints."""
    yield _command("quantize", "Quantize the checkpoint MODEL and write the result to OUT.")
    yield _command("plan", "Print the plan of `quark quantize MODEL` with these options: layers, sizes, memory, time, and errors.")
    yield _command(
        "evaluate",
        "Print the perplexity of MODEL, its KL divergence from a reference, or its scores in tasks.",
    )
    yield _command("report", "Write the report of the export OUT (quark_report.html and .json), and print its findings.")
    yield _command(
        "inspect",
        "Print whether a quantized checkpoint is complete, which runtimes load it, and why others do not.",
    )


@hookimpl
def quark_on_event(event: Event) -> None:
    """Show the progress of a run, with a bar on a terminal or with lines in the log."""
    from quark_workbench.cli.display import display  # not above: listings have no events

    display(event)


@hookimpl
def quark_measure(moment: Moment) -> None:
    """Measure layers, inputs and hidden states for the report of a run."""
    _MEASURE.load()(moment)


@hookimpl
def quark_register_datasets() -> Iterator[DatasetRecord]:
    """Yield the sources of samples: files of several kinds, any data set of the Hugging Face Hub, and a few
    named data sets.
    """
    yield _files("text", (".txt",), "plain text: one sample a file, or parts of it")
    yield _files("json_lines", (".jsonl", ".ndjson", ".json"), "JSON: an object with a text or a chat in each line, or a list of objects")
    yield _files("parquet", (".parquet",), "Parquet tables with a column of texts or chats")
    yield _online("huggingface", "any data set of the package `datasets`: of the Hub, or a local directory")
    yield _online("pileval", "the Pile's validation data, as AWQ calibrates")
    yield _online("wikitext", "WikiText-2, one long text, as GPTQ calibrates")
    yield _online("cnn_dailymail", "news articles")
    yield _online("ultrachat", "chats, through the tokenizer's chat template")


@hookimpl
def quark_register_metrics() -> Iterator[MetricRecord]:
    """Yield the metrics that can be measured in addition to perplexity and KL divergence."""
    metrics = "quark_workbench.evaluate.metrics"
    yield MetricRecord(name="accuracy", metric=f"{metrics}:accuracy", summary="share of tokens that are the most likely one")
    yield MetricRecord(name="entropy", metric=f"{metrics}:entropy", summary="entropy of the predictions, in nats")
    yield MetricRecord(
        name="total_variation",
        metric=f"{metrics}:total_variation",
        needs_reference=True,
        summary="half the sum of differences of probabilities to the reference, 0 to 1",
    )


@hookimpl
def quark_register_selectors() -> Iterator[SelectorRecord]:
    """Yield the record of the selector for automatic mixed precision."""
    yield SelectorRecord(
        name="mixed_precision",
        aliases=("amp",),
        summary="the smallest predicted divergence under a budget: output errors weighted by squared gradients, an exact knapsack",
        selector="quark_workbench.mixed_precision.by_sensitivity.selector:MixedPrecision",
        capabilities={"calibration"},
    )


def _command(name: str, summary: str) -> CommandRecord:
    return CommandRecord(name=name, command=f"quark_workbench.commands.{name}:{name}", summary=summary)


def _files(name: str, suffixes: tuple[str, ...], summary: str) -> DatasetRecord:
    module = "quark_workbench.data.files"
    return DatasetRecord(name=name, samples=f"{module}:{name}", example=f"{module}:write_{name}", suffixes=suffixes, summary=summary)


def _online(name: str, summary: str) -> DatasetRecord:
    return DatasetRecord(name=name, samples=f"quark_workbench.data.hub:{name}", is_online=True, summary=summary)
