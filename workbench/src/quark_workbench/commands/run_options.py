"""Options that several commands have: the data to calibrate on, how a checkpoint is written, and the groups of these."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from quark.cli.given_options import given_options
from quark.cli.sizes import size_in_bytes
from quark.errors import CalibrationError
from quark_workbench.commands.config_options import config_options

if TYPE_CHECKING:
    from quark.checkpoint import ExportOptions

__all__ = [
    "GROUPS",
    "CalibrationChoices",
    "ExportChoices",
    "Probe",
    "TrustRemoteCode",
    "WritingChoices",
    "calibration_batches",
    "calibration_choices",
    "export_choices",
    "writing_choices",
]

Probe = Annotated[
    bool, typer.Option("--probe/--no-probe", help="Measure this machine for a plan's estimate of the time, in a few seconds.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the code that comes with the checkpoint; without, one that needs it is refused.")
]
Calibration = Annotated[
    str | None,
    typer.Option(
        help="Data for static activation scales and calibrated rounding: a file or directory of text, JSON lines or Parquet, or a source "
        "by its name; `quark datasets` lists them."
    ),
]
CalibrationOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--calib-option",
        help="KEY=VALUE for the source of the data, such as column=text; `quark datasets NAME` shows them. May be repeated.",
    ),
]
Seed = Annotated[int | None, typer.Option("--calib-seed", help="Shuffle the samples by this number; by default they are taken in order.")]
BatchSize = Annotated[int, typer.Option("--calib-batch-size", min=1, help="Calibration sequences in a batch.")]
OneSample = Annotated[
    bool,
    typer.Option(
        "--one-sample-per-sequence", help="Calibrate on the beginning of each sample; by default samples are packed one after another."
    ),
]


@attrs.frozen(slots=False)
class CalibrationChoices:
    """Which data were asked for.

    Attributes:
        source: The values of ``--calib`` and ``--calib-option``.
        count: Sequences.
        length: Tokens of a sequence.
        choices: Other arguments of `quark.calibration.data.token_sequences`.
    """

    source: tuple[str | None, list[str] | None]
    count: int
    length: int
    choices: dict[str, Any]

    def refuse_missing(self) -> None:
        """Check that the data are there; nothing is read. Raises as `quark.calibration.data.read_samples`."""
        from quark.calibration.data import read_samples

        spec, options = self.source
        if spec is not None:
            read_samples(spec, given_options("--calib-option", options))

    def of(self, model: Path, *, trust_remote_code: bool) -> CalibrationData:
        """Return the data for a checkpoint, which are read when something needs them."""
        return CalibrationData(self, model, trust_remote_code)


class CalibrationData:
    """Gives calibration batches, once something needs them.

    Args:
        chosen: Which.
        model: Directory of the checkpoint, which has the tokenizer.
        trust_remote_code: Whether code that comes with the checkpoint may run.
    """

    def __init__(self, chosen: CalibrationChoices, model: Path, trust_remote_code: bool) -> None:
        self._chosen, self._model, self._trust_remote_code = chosen, model, trust_remote_code

    @functools.cached_property
    def tokenizer(self) -> Any:
        """Return the tokenizer; None where the checkpoint has none."""
        from quark.models.hf.tokenizer import load_tokenizer

        return load_tokenizer(self._model, trust_remote_code=self._trust_remote_code)

    def __call__(self, wanted_by: str) -> list[Any]:
        """Return the batches; ``wanted_by`` says what needs them."""
        chosen = self._chosen
        return calibration_batches(self.tokenizer, wanted_by, chosen.source, chosen.count, chosen.length, **chosen.choices)


def calibration_choices(
    calib: Calibration = None,
    calib_option: CalibrationOptions = None,
    calib_seed: Seed = None,
    calib_batch_size: BatchSize = 1,
    one_sample_per_sequence: OneSample = False,
    num_calib: Annotated[int, typer.Option(min=1, help="Calibration sequences.")] = 128,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens in a calibration sequence.")] = 512,
) -> CalibrationChoices:
    """Return which data were asked for."""
    choices = {"packing": not one_sample_per_sequence, "batch_size": calib_batch_size, "seed": calib_seed}
    return CalibrationChoices((calib, calib_option), num_calib, seq_len, choices)


def calibration_batches(
    tokenizer: Any, wanted_by: str, source: tuple[str | None, list[str] | None], count: int, length: int, **choices: Any
) -> list[Any]:
    """Return the calibration batches for the options.

    Args:
        tokenizer: Of the checkpoint; None where it has none.
        wanted_by: What needs data, for the message.
        source: The values of ``--calib`` and ``--calib-option``.
        count: Sequences.
        length: Tokens of a sequence.
        choices: Other arguments of `quark.calibration.data.token_sequences`.

    Raises:
        CalibrationError: No data are given, or they cannot be read; or the checkpoint has no tokenizer.
    """
    from quark.calibration.data import read_samples, token_sequences

    spec, options = source
    if spec is None:
        raise CalibrationError(f"calibration text is needed by {wanted_by}: give --calib FILE, DIR or NAME (`quark datasets` lists names)")
    samples = read_samples(spec, given_options("--calib-option", options))
    return token_sequences(tokenizer, samples, count, length, **choices)


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


GROUPS: dict[str, Callable[..., Any]] = {"config": config_options, "calibration": calibration_choices, "export": export_choices}
"""Groups of options that ``quark plan`` and ``quark quantize`` have: name of the argument → function that reads it."""
