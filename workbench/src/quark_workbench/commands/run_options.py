"""Groups of options that several commands share: the calibration data, and the way to write a checkpoint."""

from __future__ import annotations

import functools
import os
import random
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from quark.errors import CalibrationError
from quark_workbench.commands.config_options import ConfigOptions
from quark_workbench.commands.given_options import given_options, size_in_bytes

if TYPE_CHECKING:
    from torch import nn

    from quark.checkpoint import ExportOptions
    from quark_workbench.data import Sample
    from quark_workbench.data.processor import SampleProcessor
    from quark_workbench.mixed_precision import SelectionResult

__all__ = ["GROUPS", "CalibrationChoices", "ExportChoices", "Probe", "TrustRemoteCode", "WithoutModel", "WritingChoices", "command_line"]

Probe = Annotated[
    bool, typer.Option("--probe/--no-probe", help="Measure this machine for a few seconds, so that the plan can estimate the time.")
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run the Python code that comes with the checkpoint. Without this option, a checkpoint that needs its own code is refused.",
    ),
]
WithoutModel = Annotated[
    bool,
    typer.Option(
        "--without-model",
        help="Quantize by the names and shapes of tensors, for a checkpoint whose model class transformers does not have. Weights "
        "are rounded to nearest; activations are dynamic or float. No code runs.",
    ),
]


@attrs.frozen(slots=False, kw_only=True)
class CalibrationChoices:
    """Command-line options for the calibration data."""

    calib: Annotated[
        list[str] | None,
        typer.Option(
            help="Data for static activation scales and calibrated rounding: a file or directory of text, JSON lines or "
            "Parquet (also with images or sounds), or a source by its name; `quark datasets` lists them. May be repeated: each source "
            "gives the same number of sequences."
        ),
    ] = None
    calib_option: Annotated[
        list[str] | None,
        typer.Option(
            help="KEY=VALUE for the source of the data, such as column=text; `quark datasets NAME` shows its options. May be repeated."
        ),
    ] = None
    calib_seed: Annotated[int | None, typer.Option(help="Shuffle the samples with this seed; by default they keep their order.")] = None
    calib_batch_size: Annotated[int, typer.Option(min=1, help="Calibration sequences in a batch.")] = 1
    one_sample_per_sequence: Annotated[
        bool,
        typer.Option(
            "--one-sample-per-sequence", help="Calibrate on the beginning of each sample; by default samples are joined without gaps."
        ),
    ] = False
    num_calib: Annotated[int, typer.Option(min=1, help="Calibration sequences.")] = 128
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens in a calibration sequence.")] = 512

    def refuse_missing(self) -> None:
        """Raise an error if the data do not exist. The data are not read.

        The errors are those of `quark_workbench.data.read_samples`.
        """
        from quark_workbench.data import read_samples

        for source in self.calib or ():
            read_samples(source, given_options("--calib-option", self.calib_option))

    def have_media(self, path: Path, *, trust_remote_code: bool) -> bool:
        """Return whether one of the first samples has an image or a sound.

        If so, the processor of the checkpoint is loaded. The errors are those of
        `quark_workbench.data.processor.load_processor`.
        """
        from quark_workbench.data import read_samples
        from quark_workbench.data.media_rows import has_media
        from quark_workbench.data.processor import load_processor

        options = given_options("--calib-option", self.calib_option)
        first = (sample for source in self.calib or () for sample in islice(read_samples(source, options), self.num_calib))
        if not any(map(has_media, first)):
            return False
        load_processor(path, trust_remote_code=trust_remote_code)
        return True

    def samples(self, count: int) -> list[Sample]:
        """Return at most ``count`` samples, in equal numbers from all sources.

        They are the first samples of each source, or random samples if the options have a seed. The errors
        are those of `quark_workbench.data.read_samples`.
        """
        from quark_workbench.data import read_samples

        options = given_options("--calib-option", self.calib_option)
        chosen: list[Sample] = []
        for number, source in enumerate(self.calib or ()):
            samples: Iterable[Sample] = read_samples(source, options)
            if self.calib_seed is not None:
                samples = list(samples)
                random.Random(self.calib_seed).shuffle(samples)
            chosen += islice(samples, len(range(number, count, len(self.calib or ()))))
        return chosen

    def of(self, path: Path, model: nn.Module, dtype: str, *, trust_remote_code: bool) -> CalibrationData:
        """Return the calibration data for a checkpoint.

        ``model`` is the checkpoint's model on the meta device. The data are read when they are first needed.
        """
        return CalibrationData(self, path, model, dtype, trust_remote_code)

    def batches(self, reader: CalibrationData, wanted_by: str) -> list[Any]:
        """Return the calibration batches.

        Args:
            reader: An object with the tokenizer and the processor of the checkpoint.
            wanted_by: The part of the run that needs data, for the message.

        Raises:
            CalibrationError: No data are given, the data cannot be read, or the checkpoint lacks the
                tokenizer or the processor for such data.
            UnsupportedError: The data are texts, but the model needs images or sounds.
        """
        from quark_workbench.data import read_samples, token_sequences
        from quark_workbench.data.media_rows import has_media

        if not self.calib:
            raise CalibrationError(f"no calibration text for {wanted_by}: give --calib FILE, DIR or NAME (`quark datasets` lists names)")
        if self.num_calib < len(self.calib):
            raise CalibrationError(
                f"--num-calib {self.num_calib} is less than one sequence for each of the {len(self.calib)} --calib sources: give a larger "
                f"number"
            )
        options = given_options("--calib-option", self.calib_option)
        packing, size, seed = not self.one_sample_per_sequence, self.calib_batch_size, self.calib_seed
        batches: list[Any] = []
        for number, source in enumerate(self.calib):
            samples, count = read_samples(source, options), len(range(number, self.num_calib, len(self.calib)))
            first = list(islice(samples, count))
            samples = chain(first, samples)
            if any(map(has_media, first)):
                if size > 1:
                    raise CalibrationError("samples with images or sounds run one at a time: leave out --calib-batch-size")
                batches += reader.processor.batches(samples, count, seed)
            else:
                reader.refuse_text(wanted_by)
                batches += token_sequences(reader.tokenizer, samples, count, self.seq_len, packing=packing, batch_size=size, seed=seed)
        return batches


def command_line(arguments: Sequence[str]) -> str:
    """Return the command line as the report shows it.

    Each path is cut to its last name, since reports are shared.

    >>> command_line(["quantize", "/home/me/llama", "out", "--calib=~/texts/a", "--option", "file=../b"])
    'quark quantize llama out --calib=a --option file=b'
    """
    slashes = f"[{re.escape(os.sep + (os.altsep or ''))}]+"
    home = os.path.expanduser("~").rstrip(os.sep)

    def shortened(part: str) -> str:
        if part.rstrip(os.sep) == home:
            return "~"  # the last name of the home directory is a user's name
        return next((name for name in reversed(re.split(slashes, part)) if name), part)

    return shlex.join(["quark", *("".join(map(shortened, re.split("([=:,])", argument))) for argument in arguments)])


class CalibrationData:
    """The calibration batches of a checkpoint. The data are read when the batches are first needed.

    Args:
        chosen: The options for the data.
        path: Directory of the checkpoint, from which the tokenizer and the processor are loaded.
        model: The checkpoint's model, on the meta device.
        dtype: Name of the dtype of the run.
        trust_remote_code: Whether code that comes with the checkpoint may run.
    """

    def __init__(self, chosen: CalibrationChoices, path: Path, model: nn.Module, dtype: str, trust_remote_code: bool) -> None:
        self._chosen, self._path, self._model, self._dtype, self._trust_remote_code = chosen, path, model, dtype, trust_remote_code

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, or None if the checkpoint has no tokenizer."""
        from quark.models.hf.tokenizer import load_tokenizer

        return load_tokenizer(self._path, trust_remote_code=self._trust_remote_code)

    @functools.cached_property
    def processor(self) -> SampleProcessor:
        """The processor of images and sounds.

        The errors are those of `quark_workbench.data.processor.load_processor`.
        """
        from quark.models.hf.loading import torch_dtype
        from quark_workbench.data.processor import load_processor

        dtype = torch_dtype(self._dtype) or next(p.dtype for p in self._model.parameters() if p.is_floating_point())
        return attrs.evolve(load_processor(self._path, trust_remote_code=self._trust_remote_code), dtype=dtype)

    def refuse_text(self, wanted_by: str) -> None:
        """Raise an error if the model cannot be calibrated on texts.

        Raises:
            UnsupportedError: The model takes images or sounds.
        """
        from quark.calibration.batches import refuse_text

        refuse_text(type(self._model), f"give --calib rows with images or sounds for {wanted_by}, or batches in Python")

    def __call__(self, wanted_by: str) -> list[Any]:
        """Return the batches. ``wanted_by`` names the part of the run that needs data, for the messages.

        Raises:
            UnsupportedError: The data are texts, but the model takes images or sounds.
        """
        if not self._chosen.calib:
            self.refuse_text(wanted_by)
        return self._chosen.batches(self, wanted_by)


@attrs.frozen(kw_only=True)
class ExportChoices:
    """Command-line options for writing a checkpoint."""

    exporter: Annotated[str, typer.Option(help="Exporter; `quark exporters` lists them.")] = "safetensors"
    exporter_option: Annotated[
        list[str] | None,
        typer.Option(
            help="KEY=VALUE for the exporter, such as pack_method=order; `quark exporters NAME` shows its options. May be repeated."
        ),
    ] = None
    max_shard_size: Annotated[
        str | None, typer.Option(help="Largest size of one file of the checkpoint, such as 512MiB; the default is 5GB.")
    ] = None

    def options(self, tokenizer: Any = None) -> ExportOptions:
        """Return the options of the export.

        Raises:
            ConfigError: An option cannot be read.
            UnknownNameError: There is no such exporter, or it has no such option.
        """
        from quark.checkpoint.export import export_options

        chosen = given_options("--exporter-option", self.exporter_option)
        if self.max_shard_size is not None:
            chosen["max_shard_bytes"] = size_in_bytes(self.max_shard_size, "--max-shard-size")
        return attrs.evolve(export_options(self.exporter, chosen), tokenizer=tokenizer)


@attrs.frozen(kw_only=True)
class WritingChoices:
    """Command-line options for the output directory: what happens to an earlier run, and the report."""

    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue an interrupted run after its finished blocks, or start a new run if no block is finished. If OUT is "
            "finished, do nothing.",
        ),
    ] = False
    restart: Annotated[bool, typer.Option("--restart", help="Discard the finished blocks of an interrupted run to OUT.")] = False
    report: Annotated[
        str,
        typer.Option(
            help="Size of the report in OUT (quark_report.html and .json): full also hashes the weights, and compares hidden states and "
            "the metrics of `quark evaluate` on a few samples of --calib."
        ),
    ] = "standard"
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no report.")] = False

    def arguments(self, started: float, selection: SelectionResult | None) -> dict[str, Any]:
        """Return the arguments of `quark.runs.quantize_checkpoint` that these options set.

        Args:
            started: The value of `time.perf_counter` at the start of the program.
            selection: The selection of schemes that the report plots; None if there was no selection.
        """
        from quark_workbench.report import ReportOptions

        drawn = None if selection is None else selection.to_dict()
        report = None if self.no_report else ReportOptions(self.report, command_line(sys.argv[1:]), started, drawn)
        return {"resume": self.resume, "restart": self.restart, "report": report}

    def add_metrics(self, out: Path, model: Path, data: CalibrationChoices, *, device: str, trust_remote_code: bool) -> None:
        """Add the metrics of `quark evaluate` to the report if ``--report full`` and ``--calib`` are given.

        The arguments are as in `quark_workbench.commands.reported_metrics.add_metrics`.
        """
        from quark_workbench.commands.reported_metrics import add_metrics

        if self.report == "full" and not self.no_report and data.calib:
            add_metrics(out, model, data, device=device, trust_remote_code=trust_remote_code)


GROUPS: dict[str, Callable[..., Any]] = {"config": ConfigOptions, "calibration": CalibrationChoices, "export": ExportChoices}
"""Dictionary from name of argument to class of options, for ``quark plan`` and ``quark quantize``."""
