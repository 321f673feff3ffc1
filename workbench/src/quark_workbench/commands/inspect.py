"""``quark inspect``: whether a quantized checkpoint is whole, and which runtimes would load it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quark.errors import CheckpointError
from quark_workbench.commands.run_options import TrustRemoteCode

if TYPE_CHECKING:
    from quark.checkpoint.inspection import Inspection

__all__ = ["inspect"]


def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="Directory of a quantized checkpoint.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all of it, and compare it with the checksums made when quark wrote it.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the inspection as JSON.")] = False,
) -> None:
    """Print whether a quantized checkpoint is whole, which runtimes would load it, by which of their methods,
    and why others refuse.

    The runtimes are not needed: the rules of their readers are applied. No weight is read, but with --verify.
    """
    # Torch and transformers are imported here, not above: `quark --help` does without them.
    from quark.checkpoint.inspection import inspect_checkpoint

    inspection = inspect_checkpoint(checkpoint, trust_remote_code=trust_remote_code, verify=verify)
    typer.echo(json.dumps(inspection.to_dict(), indent=2) if as_json else "\n".join(_lines(inspection)))
    if inspection.damage:
        raise CheckpointError(f"'{checkpoint}' is damaged: make or fetch it again")


def _lines(inspection: Inspection) -> list[str]:
    lines = [f"layout: {inspection.layout}"] if inspection.layout else []
    lines += [f"damaged: {what}" for what in inspection.damage]
    if inspection.verified:
        lines.append(f"verified: {inspection.verified} tensors are as they were written")
    for support in inspection.runtimes:
        lines.append(f"{support.runtime} ({support.summary}): {'loads it' if support.loads else 'does not load it'}")
        lines += [f"  refused: {reason}" for reason in support.refusals]
        lines += [f"  {layers}: {method}" for method, layers in support.methods.items()]
        lines += [f"  note: {note}" for note in support.notes]
    if not inspection.runtimes and not inspection.damage:
        lines.append("whole; the rules of runtimes for this layout are not known here")
    return lines
