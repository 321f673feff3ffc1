"""The commands of the ``quark`` program: its own listing commands, and the commands that plugins register.

The code of a plugin's command is imported when the user calls the command.
"""

from __future__ import annotations

from functools import cached_property
from types import MappingProxyType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from quark.errors import PluginError, UnknownNameError
from quark.plugins.attribution import Origin
from quark.plugins.catalog import Catalog, recorded_catalog
from quark.plugins.failures import leave_out
from quark_workbench.cli.listing_commands import LISTINGS

__all__ = ["CommandGroup", "typer_command"]

_BROUGHT_BY = MappingProxyType(
    dict.fromkeys(("quantize", "plan", "evaluate", "report", "inspect"), "quark-workbench")
    | {"check": "quark-devkit", "new-plugin": "quark-devkit", "demo": "quark-tiny-model"}
)
"""Commands of this project's other distributions, for the message if one is not installed."""


class CommandGroup(TyperGroup):
    """The ``quark`` program. Its help is made from the plugins' records, so that no command is imported."""

    _origin: Origin | None = None

    @cached_property
    def _catalog(self) -> Catalog:
        return recorded_catalog()

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands. The listing commands come first."""
        commands = self._catalog.commands
        return [*(name for name in LISTINGS if name not in commands), *commands.in_order()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command that has only a name and a summary, for the help; None for an unknown name."""
        if cmd_name not in self._catalog.commands:
            listing = LISTINGS.get(cmd_name)
            return None if listing is None else TyperCommand(cmd_name, help=listing.__doc__, rich_help_panel="Listings")
        record = self._catalog.commands.get(cmd_name)
        return TyperCommand(cmd_name, help=record.summary, rich_help_panel=record.group or None)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str, Any, list[str]]:
        """Return the name of the called command, the command, and its arguments.

        Raises:
            ConfigError: No plugin has a command of that name, or two plugins have one.
            PluginError: The command's code cannot be loaded, or typer cannot read its arguments.
        """
        name, *rest = args
        command, commands = typer_command(name, self._catalog), self._catalog.commands
        self._origin = Origin(f"the command '{name}'", commands.source(name)) if name in commands else None
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        """Call the command. If it raises an error, add a note that names the plugin of the command."""
        try:
            return super().invoke(ctx)
        except BaseException as error:
            if self._origin is not None:
                error.add_note(f"raised by {self._origin}")
            raise


def typer_command(name: str, catalog: Catalog | None = None) -> Any:
    """Return a command as a typer object.

    Args:
        name: Name of the command.
        catalog: The plugins; None for the plugins of this process.

    Raises:
        UnknownNameError: (a ValueError) There is no such command. The message names a similar command, and
            the distribution that may be missing.
        AmbiguousNameError: (a ValueError) Two distributions have a command of that name.
        PluginError: The command's code cannot be loaded, or typer cannot read the command's arguments.
    """
    catalog = recorded_catalog() if catalog is None else catalog
    try:
        is_own = name in LISTINGS and name not in catalog.commands
        target = LISTINGS[name] if is_own else catalog.commands.load_command(name)
    except UnknownNameError as error:
        if name not in _BROUGHT_BY or not (missing := catalog.missing([_BROUGHT_BY[name]])):
            raise
        fix = missing.replace("The built-in ones come", "It comes", 1)
        raise error.saying(f"there is no command '{name}'. {fix}") from None
    app = typer.Typer()
    try:
        app.add_typer(target, name=name) if isinstance(target, typer.Typer) else app.command(name)(target)
        return typer.main.get_group(app).commands[name]
    except Exception as error:  # typer reads a plugin's annotations, which can raise any error
        source = catalog.commands.source(name)
        raise PluginError(
            f"the command '{name}' of {source} cannot be read by typer ({type(error).__name__}: {error}): {leave_out(source, error)}"
        ) from error
