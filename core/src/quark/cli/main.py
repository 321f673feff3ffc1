"""The ``quark`` program: gathers the commands; every error raised on purpose becomes one readable paragraph and exit code 2."""

from __future__ import annotations

import sys

import typer

from quark.cli import demo, evaluate, listing, quantize
from quark.environment import refuse_rival
from quark.errors import QuarkError

app = typer.Typer(
    name="quark",
    help="Quantize language models. Schemes, formats, algorithms, templates and exporters are plugins: see `quark plugins`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (quantize, evaluate, demo, listing):
    command.register(app)


def main() -> None:
    """Run the program."""
    try:
        refuse_rival()
        app()
    except QuarkError as error:
        typer.secho(f"quark: {error}", err=True, fg=typer.colors.RED)
        sys.exit(2)
