"""Printing of a planned run, for ``quark plan`` and ``quark quantize --dry-run``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from quark.cli.given_options import given_options
from quark.errors import CalibrationError, QuarkError, UnknownNameError

if TYPE_CHECKING:
    from quark.runs.planned_run import PlannedRun

__all__ = ["print_planned", "refuse"]


def print_planned(source: Path, out: Path | None, config: Any, *, given: dict[str, Any], as_json: bool) -> None:
    """Print the planned run.

    Args:
        source: The checkpoint.
        out: Where the run would write; None where that is not asked.
        config: As of `quark.runs.plan`.
        given: Options of ``quark quantize`` by name: ``calib``, ``num_calib``, ``seq_len``, ``device``, ``dtype``, ``exporter``,
            ``exporter_option``, ``probe`` and ``trust_remote_code``.
        as_json: Whether JSON is printed.

    Raises:
        QuarkError: Something refuses the run: all that is known of it, after the plan has been printed.
    """
    from quark.checkpoint.destination import refuse_used_directory
    from quark.checkpoint.export import export_options
    from quark.runs.estimate_text import planned_lines
    from quark.runs.planned_run import plan as planned_run
    from quark.runs.workload import Calibration

    errors: list[QuarkError] = []
    options = None
    try:
        options = export_options(given["exporter"], given_options("--exporter-option", given["exporter_option"]))
    except UnknownNameError:
        pass  # the plan says so
    except QuarkError as error:
        errors.append(error)
    try:
        if out is not None:
            refuse_used_directory(out)
    except QuarkError as error:
        errors.append(error)
    if given["calib"] is not None and not given["calib"].exists():
        errors.append(CalibrationError(f"'{given['calib']}' is neither a text file nor a directory with .txt files"))
    planned = planned_run(
        source,
        config,
        calibration=Calibration(given["num_calib"], given["seq_len"]),
        device=given["device"],
        dtype=given["dtype"],
        exporter=given["exporter"],
        options=options,
        probing=given["probe"],
        trust_remote_code=given["trust_remote_code"],
    ).with_errors(errors)
    if as_json:
        typer.echo(json.dumps(planned.to_dict(), indent=2))
    elif lines := planned_lines(planned):
        typer.echo("\n".join(lines))
    refuse(planned)


def refuse(planned: PlannedRun) -> None:
    """Raise QuarkError with everything that refuses a planned run; nothing where nothing does."""
    messages = [refusal.message for refusal in planned.refusals]
    if len(messages) == 1:
        raise QuarkError(messages[0])
    if messages:
        raise QuarkError("\n".join([f"this run would be refused, for {len(messages)} reasons:", *(f"- {m}" for m in messages)]))
