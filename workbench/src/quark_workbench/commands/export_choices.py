"""Options of the command line that say how a checkpoint is written: exporter, files, earlier runs, report."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from quark.cli.given_options import given_options, size_in_bytes

if TYPE_CHECKING:
    from quark.checkpoint import ExportOptions

__all__ = ["ExportChoices", "WritingChoices", "export_choices", "writing_choices"]

ExporterOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--exporter-option",
        help="KEY=VALUE for the exporter, such as pack_method=order; `quark exporters NAME` shows its options. May be repeated.",
    ),
]
MaxShardSize = Annotated[
    str | None, typer.Option(help="Largest size of one file of the checkpoint, such as 5GB, which is the default, or 512MiB.")
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on from the finished blocks of an earlier run to OUT that did not end; without any, start from the beginning. If OUT is "
        "finished, do nothing.",
    ),
]
Restart = Annotated[bool, typer.Option("--restart", help="Discard the finished blocks of an earlier run to OUT that did not end.")]
Report = Annotated[
    str,
    typer.Option(
        help="What the report measures, standard or full: full also hashes the weights and compares hidden states on a few samples. The "
        "report lies in OUT: quark_report.html, and the same as JSON."
    ),
]
NoReport = Annotated[bool, typer.Option("--no-report", help="Write no report.")]


@attrs.frozen
class ExportChoices:
    """What was asked of the export; attributes as the options of these names."""

    exporter: str
    exporter_option: list[str] | None
    max_shard_size: str | None

    def options(self, tokenizer: Any = None) -> ExportOptions:
        """Return the options of the export.

        Raises:
            ConfigError: One cannot be read.
            UnknownNameError: The exporter, or one of its options, is not there.
        """
        from quark.checkpoint.chosen_exporter import export_options

        chosen = given_options("--exporter-option", self.exporter_option)
        if self.max_shard_size is not None:
            chosen["max_shard_bytes"] = size_in_bytes(self.max_shard_size, "--max-shard-size")
        return attrs.evolve(export_options(self.exporter, chosen), tokenizer=tokenizer)


def export_choices(
    exporter: Annotated[str, typer.Option(help="Exporter; `quark exporters` lists them.")] = "safetensors",
    exporter_option: ExporterOptions = None,
    max_shard_size: MaxShardSize = None,
) -> ExportChoices:
    """Return what was asked of the export."""
    return ExportChoices(exporter, exporter_option, max_shard_size)


@attrs.frozen
class WritingChoices:
    """What was asked of the output directory; attributes as the options of these names, and the selection that the report draws."""

    resume: bool
    restart: bool
    report: str
    no_report: bool
    selection: dict[str, Any] | None = None

    def arguments(self, started: float) -> dict[str, Any]:
        """Return these arguments of `quark.runs.quantize_checkpoint`; ``started`` is when the program began (`time.perf_counter`)."""
        from quark_workbench.report import ReportOptions

        command = shlex.join(["quark", *sys.argv[1:]])
        report = None if self.no_report else ReportOptions(self.report, command, started, self.selection)
        return {"resume": self.resume, "restart": self.restart, "report": report}


def writing_choices(
    resume: Resume = False, restart: Restart = False, report: Report = "standard", no_report: NoReport = False
) -> WritingChoices:
    """Return what was asked of the output directory."""
    return WritingChoices(resume, restart, report, no_report)
