"""``quark report`` writes the report of an export, and can compare the export with the float checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import attrs
import typer

from quark_workbench.commands.event_lines import print_result
from quark_workbench.commands.given_options import command
from quark_workbench.commands.run_options import CalibrationChoices, TrustRemoteCode

__all__ = ["report"]


@attrs.frozen(slots=False, kw_only=True)
class ComparedData(CalibrationChoices):
    """Command-line options for the data on which the report compares an export with its float checkpoint."""

    calib: Annotated[
        list[str] | None,
        typer.Option(
            help="Data for the comparison of hidden states and for the metrics of `quark evaluate`, as for `quark quantize`. Needs "
            "--float. May be repeated."
        ),
    ] = None
    num_calib: Annotated[int, typer.Option(min=1, help="Sequences of the data, or samples with images or sounds.")] = 4


@command("report", data=ComparedData)
def report(
    out: Annotated[Path, typer.Argument(help="Directory of an export.")],
    float_model: Annotated[
        Path | None,
        typer.Option("--float", help="Directory of the float checkpoint to compare the weights with, one block in memory at a time."),
    ] = None,
    *,
    data: ComparedData,
    to: Annotated[
        Path | None,
        typer.Option(
            help="Directory for the two files of the report. The default is OUT, where they replace the files of an earlier report."
        ),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON lines: the events of the run, and the findings on the last line.")
    ] = False,
) -> None:
    """Write the report of the export OUT (quark_report.html and .json), and print its findings."""
    # Torch and transformers are imported here, not above: `quark --help` and the listings do without them.
    from quark.checkpoint.destination import REPORT_FILES
    from quark.models.hf.skeleton import meta_model
    from quark_workbench.commands.reported_metrics import reported_metrics
    from quark_workbench.report import write_contents
    from quark_workbench.report.export_report import export_report

    samples = None
    if data.calib and float_model is not None:
        skeleton = meta_model(float_model, trust_remote_code=trust_remote_code)
        samples = data.of(float_model, skeleton, "auto", trust_remote_code=trust_remote_code)("hidden states")
    elif data.calib:
        raise typer.BadParameter("--calib needs the float model, because it compares hidden states: add --float MODEL")
    contents = export_report(out, float_model, samples, trust_remote_code=trust_remote_code)
    if samples is not None and float_model is not None:
        contents["evaluation"] = reported_metrics(out, float_model, data, trust_remote_code=trust_remote_code)
    target = to or out
    target.mkdir(parents=True, exist_ok=True)
    write_contents(contents, target)
    if as_json:
        print_result({"out": str(target), "flags": contents["flags"]})
    else:
        findings = [f"{flag['level'].upper()}: {flag['title']}. {flag['advice']}" for flag in contents["flags"]]
        typer.echo("\n".join([*(findings or ["No value crosses a threshold."]), f"{target / REPORT_FILES[1]}"]))
