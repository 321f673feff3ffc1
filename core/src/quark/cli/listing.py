"""The listing commands: ``quark plugins`` and ``quark formats|observers|schemes|algorithms|templates|exporters``."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the listing commands."""
