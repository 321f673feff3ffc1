"""Options of the command line that say which data to calibrate on, and the batches that they give."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer

from quark.cli.given_options import given_options
from quark.errors import CalibrationError

__all__ = ["CalibrationChoices", "calibration_batches", "calibration_choices"]

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
