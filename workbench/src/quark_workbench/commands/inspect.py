"""``quark inspect`` tells whether a quantized checkpoint is complete, and which runtimes can load it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quark.errors import CheckpointError, ConfigError
from quark_workbench.commands.run_options import TrustRemoteCode

if TYPE_CHECKING:
    from quark.checkpoint.inspection import Inspection

__all__ = ["inspect"]


def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="Directory of a quantized checkpoint.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read all files and compare them with the checksums that quark wrote.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    without_model: Annotated[
        bool,
        typer.Option(
            "--without-model",
            help="Check only the names and shapes of the tensors, as for an output of quantize --without-model. No code runs.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the inspection as JSON.")] = False,
) -> None:
    """Print whether a quantized checkpoint is complete, which runtimes load it, and why others do not.

    The runtimes need not be installed, since quark knows the rules of their readers.
    Only --verify reads weights. --without-model cannot tell which tensors of the float model are missing.
    """
    # Torch and transformers are imported here, not above: `quark --help` does without them.
    from quark.checkpoint.inspection import inspect_checkpoint
    from quark_workbench.without_model import named_model

    if without_model and trust_remote_code:
        raise ConfigError("--without-model runs no code: leave out --trust-remote-code")
    build = named_model if without_model else None
    inspection = inspect_checkpoint(checkpoint, trust_remote_code=trust_remote_code, verify=verify, build=build)
    typer.echo(json.dumps(inspection.to_dict(), indent=2) if as_json else "\n".join(_lines(inspection)))
    if inspection.damage:
        raise CheckpointError(f"'{checkpoint}' is damaged: export or download it again")


def _lines(inspection: Inspection) -> list[str]:
    lines = [f"layout: {inspection.layout}"] if inspection.layout else []
    lines += [f"damaged: {what}" for what in inspection.damage]
    if inspection.verified:
        lines.append(f"verified: the checksums of {inspection.verified} tensors agree")
    for support in inspection.runtimes:
        lines.append(f"{support.runtime} ({support.summary}): {'loads it' if support.loads else 'does not load it'}")
        lines += [f"  refused: {reason}" for reason in support.refusals]
        lines += [f"  {layers}: {method}" for method, layers in support.methods.items()]
        lines += [f"  note: {note}" for note in support.notes]
    if not inspection.runtimes and not inspection.damage:
        lines.append("complete; quark does not know which runtimes load this layout")
    return lines
