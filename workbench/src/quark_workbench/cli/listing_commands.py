"""The listing commands as typer commands, which print ``--help`` and report wrong arguments.

`quark_workbench.cli.listing` runs these commands if the arguments are right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from quark.plugins.registries import KINDS
from quark_workbench.cli.listing import show

__all__ = ["LISTINGS"]

_AsJson = Annotated[bool, typer.Option("--json", help="Print all fields as JSON.")]


def _plugins(as_json: _AsJson = False) -> None:
    """List the installed plugins, plugins that failed, and names claimed twice."""
    show("plugins", as_json=as_json)


def _of_kind(plural: str) -> Callable[..., None]:
    def listing(
        name: Annotated[str | None, typer.Argument(help="Name of one record to show, with its options.")] = None, as_json: _AsJson = False
    ) -> None:
        show(plural, as_json=as_json, name=name)

    listing.__doc__ = f"List the {plural} of all plugins, or show one."
    return listing


LISTINGS = {"plugins": _plugins, **{kind.plural: _of_kind(kind.plural) for kind in KINDS}}
"""The functions of the commands: ``plugins``, and one for each kind, named in the plural."""
