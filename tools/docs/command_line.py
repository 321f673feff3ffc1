"""The command line in the documentation: the reference from the typer program, and printed output."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from typing import Any

from quark.plugins import commands
from quark_tiny_model import tiny_model_dir
from quark_workbench.cli.commands import typer_command
from quark_workbench.cli.listing_commands import LISTINGS
from quark_workbench.cli.main import program
from tools.docs.tables import cell, code, markdown_table

__all__ = ["plan_of_the_tiny_model", "reference"]


def reference() -> str:
    """Return a section for each command: description, arguments and options."""
    return "\n\n".join(_command(name, typer_command(name)) for name in [*LISTINGS, *commands().in_order()])


def _command(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join(["quark", name, *(p.name.upper() if p.required else f"[{p.name.upper()}]" for p in arguments), "[OPTIONS]"])
    rows = [[_names(p), _default(p), _prose(p.help or "")] for p in command.params]
    table = markdown_table(["argument", "default", "meaning"], rows)
    return f"## quark {name}\n\n{_prose(command.help or '')}\n\n```text\n{usage}\n```\n\n{table}"


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return code(parameter.name.upper())
    form = re.match(r"[A-Z.]+=[A-Z]+", parameter.help or "")  # such as KEY=VALUE, at the start of its help
    value = "" if parameter.is_flag else f" {form[0] if form else parameter.name.upper()}"
    return " ".join(code(f"{flag}{value}") for flag in [*parameter.opts, *parameter.secondary_opts])


def _prose(text: str) -> str:
    """Return a help text as Markdown. Only its backticks are markup; other special characters are escaped."""
    return re.sub(r"\\`(.+?)\\`", r"`\1`", cell(text))


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    default = parameter.default
    return "" if default is None or default is False or callable(default) or default in ((), []) else code(default)


def plan_of_the_tiny_model(arguments: str) -> str:
    """Return the output of ``quark quantize MODEL OUT ARGUMENTS --dry-run`` for the tiny model."""
    command = ["quantize", str(tiny_model_dir()), "OUT", *shlex.split(arguments), "--dry-run"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        program()(command, standalone_mode=False)
    return f"```text\n$ quark quantize MODEL OUT {arguments} --dry-run\n{printed.getvalue().rstrip()}\n```"
