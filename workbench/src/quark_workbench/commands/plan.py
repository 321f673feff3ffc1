"""``quark plan``: what ``quark quantize`` with the same options would do, write and need, and what would refuse it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from quark.cli.given_options import with_groups
from quark_workbench.commands.calibration_options import CalibrationChoices
from quark_workbench.commands.config_options import ConfigOptions
from quark_workbench.commands.export_choices import ExportChoices
from quark_workbench.commands.quantize import GROUPS, Probe, TrustRemoteCode

__all__ = ["plan"]


@with_groups(**GROUPS)
def plan(
    model: Annotated[Path, typer.Argument(help="Directory of a checkpoint, or of its config.json alone.")],
    config: ConfigOptions,
    calibration: CalibrationChoices,
    export: ExportChoices,
    device: Annotated[str, typer.Option(help="Torch device to work on.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: as the checkpoint says.")] = "auto",
    trust_remote_code: TrustRemoteCode = False,
    probe: Probe = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Print what `quark quantize MODEL` would do with these options, write and need, and what would refuse it.

    MODEL is a checkpoint, or a directory with its config.json alone. No weight is read, and nothing is
    written.
    """
    # Torch and transformers are imported here, not above: `quark --help` does without them.
    from quark_workbench.commands.planned import print_planned

    where: dict[str, Any] = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
    print_planned(model, None, config.config_for, calibration, export, probe=probe, as_json=as_json, **where)
