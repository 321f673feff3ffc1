"""Options of the command line that say which data to calibrate on, and the batches that they give."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from quark.cli.given_options import given_options
from quark.errors import CalibrationError

__all__ = ["BatchSize", "Calibration", "CalibrationOptions", "OneSample", "Seed", "calibration_batches"]

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
        choices: Other arguments of `quark.data.token_sequences`.

    Raises:
        CalibrationError: No data are given, or they cannot be read; or the checkpoint has no tokenizer.
    """
    from quark.data import read_samples, token_sequences

    spec, options = source
    if spec is None:
        raise CalibrationError(f"calibration text is needed by {wanted_by}: give --calib FILE, DIR or NAME (`quark datasets` lists names)")
    samples = read_samples(spec, given_options("--calib-option", options))
    return token_sequences(tokenizer, samples, count, length, **choices)
