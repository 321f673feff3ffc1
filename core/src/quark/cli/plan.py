"""``quark plan``: what ``quark quantize`` with the same options would do, write and need, and what would refuse it."""

from __future__ import annotations

import inspect
from typing import Any

import typer

from quark.cli.quantize import quantize

__all__ = ["plan", "register"]

_NOT_ASKED = ("out", "dry_run")


def register(app: typer.Typer) -> None:
    """Add the command to the program, with the options of ``quark quantize``, which has them once for both."""
    app.command("plan")(plan)


def plan(**options: Any) -> None:
    """Print what `quark quantize MODEL` would do with these options, write and need, and what would refuse it.

    MODEL is a checkpoint, or a directory with its config.json alone. No weight is read, and nothing is written.
    """
    quantize(out=None, dry_run=True, **options)


_SIGNATURE = inspect.signature(quantize, eval_str=True)
plan.__signature__ = _SIGNATURE.replace(  # type: ignore[attr-defined]
    parameters=[parameter for name, parameter in _SIGNATURE.parameters.items() if name not in _NOT_ASKED]
)
