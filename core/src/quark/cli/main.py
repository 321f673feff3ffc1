"""The ``quark`` program: gathers the commands; every error raised on purpose becomes one readable paragraph and exit code 2."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from quark.cli import listing
from quark.environment import refuse_rival
from quark.errors import QuarkError
from quark.version import VERSION

if TYPE_CHECKING:
    import typer


def program() -> typer.Typer:
    """The program with all its commands."""
    # Imported here: typer takes longer to import than a listing takes in all, and listings do without it.
    import typer

    from quark.cli import demo, evaluate, quantize

    app = typer.Typer(
        name="quark",
        help="Quantize language models. Schemes, formats, algorithms, templates and exporters are plugins: see `quark plugins`.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    version = typer.Option(False, "--version", is_eager=True, callback=_print_version, help="Print the version and stop.")

    @app.callback()
    def options(version: bool = version) -> None:
        """Options of the program itself."""

    for command in (quantize, evaluate, demo, listing):
        command.register(app)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"quark {VERSION}")
        sys.exit()


def main() -> None:
    """Run the program."""
    try:
        refuse_rival()
        if not listing.answer(sys.argv[1:]):
            program()()
    except QuarkError as error:
        red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() else ("", "")
        print(f"{red}quark: {error}{plain}", file=sys.stderr)
        sys.exit(2)
