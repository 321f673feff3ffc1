"""``quark plan`` tells what ``quark quantize`` would do with the same options, without doing it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quark.errors import QuarkError, UnknownNameError
from quark_workbench.commands.config_options import ConfigOptions
from quark_workbench.commands.given_options import command
from quark_workbench.commands.run_options import GROUPS, CalibrationChoices, ExportChoices, Probe, TrustRemoteCode, WithoutModel

if TYPE_CHECKING:
    from torch import nn

    from quark.checkpoint import ExportOptions
    from quark.config.model import QConfig
    from quark_workbench.mixed_precision import SelectionResult

__all__ = ["plan", "print_planned"]


@command(**GROUPS)
def plan(
    model: Annotated[Path, typer.Argument(help="Directory of a checkpoint; its config.json is enough.")],
    config: ConfigOptions,
    calibration: CalibrationChoices,
    export: ExportChoices,
    device: Annotated[str, typer.Option(help="Torch device to work on.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto (the dtype of the checkpoint).")] = "auto",
    trust_remote_code: TrustRemoteCode = False,
    without_model: WithoutModel = False,
    probe: Probe = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Print the plan of `quark quantize MODEL` with these options: layers, sizes, memory, time, and errors.

    MODEL is a checkpoint, or a directory with only its config.json.
    The command reads no weight and writes nothing.
    """
    where: dict[str, Any] = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code, "without_model": without_model}
    print_planned(model, None, config.config_for, calibration, export, probe=probe, as_json=as_json, **where)


def print_planned(
    source: Path,
    out: Path | None,
    config: Callable[[nn.Module], QConfig],
    calibration: CalibrationChoices,
    export: ExportChoices,
    *,
    device: str,
    dtype: str,
    trust_remote_code: bool,
    without_model: bool,
    probe: bool,
    as_json: bool,
    chosen: SelectionResult | None = None,
) -> None:
    """Print the planned run.

    Args:
        source: The checkpoint.
        out: The directory in which the run would write. None leaves out the check of this directory.
        config: As in `quark_workbench.planning.plan`.
        calibration: Options for the calibration data of the run.
        export: Options of the export.
        device: As in `quark_workbench.planning.plan`.
        dtype: As in `quark_workbench.planning.plan`.
        trust_remote_code: As in `quark_workbench.planning.plan`.
        without_model: As in `quark_workbench.planning.plan`.
        probe: Whether to measure the speed of this machine, for the estimate of the time.
        as_json: Whether to print JSON.
        chosen: The selection that chose the schemes of the configuration, which the JSON shows too.

    Raises:
        QuarkError: The run would fail. The message has all reasons. The plan is printed before the error.
    """
    # Torch and transformers are imported here, not above: `quark --help` does without them.
    from quark_workbench.planning.planned_run import plan as planned_run
    from quark_workbench.planning.planned_run import planned_lines
    from quark_workbench.planning.workload import Calibration

    options, errors = _checked(source, out, calibration, export)
    size = Calibration(
        calibration.num_calib, calibration.seq_len, lambda: calibration.have_media(source, trust_remote_code=trust_remote_code)
    )
    where: Any = {"device": device, "dtype": dtype, "exporter": export.exporter}
    where |= {"trust_remote_code": trust_remote_code, "without_model": without_model}
    planned = planned_run(source, config, calibration=size, options=options, probing=probe, **where).with_errors(errors)
    if as_json:
        selection = {} if chosen is None else {"selection": chosen.to_dict()}
        typer.echo(json.dumps(planned.to_dict() | selection, indent=2))
    elif lines := planned_lines(planned):
        typer.echo("\n".join(lines))
    messages = [refusal.message for refusal in planned.refusals]
    if len(messages) == 1:
        raise QuarkError(messages[0])
    if messages:
        raise QuarkError("\n".join([f"this run would be refused, for {len(messages)} reasons:", *(f"- {m}" for m in messages)]))


def _checked(
    source: Path, out: Path | None, calibration: CalibrationChoices, export: ExportChoices
) -> tuple[ExportOptions | None, list[QuarkError]]:
    """Return the options of the export, and the errors in arguments that the plan does not check.

    The options are None if they cannot be read.
    """
    from quark.checkpoint.destination import refuse_used_directory

    errors: list[QuarkError] = []
    options = None
    try:
        options = export.options()
    except UnknownNameError:
        pass  # the plan reports it
    except QuarkError as error:
        errors.append(error)
    try:
        if out is not None:
            refuse_used_directory(out, None if options is None else export.exporter, source=source)
    except QuarkError as error:
        errors.append(error)
    try:
        calibration.refuse_missing()
    except QuarkError as error:
        errors.append(error)
    return options, errors
