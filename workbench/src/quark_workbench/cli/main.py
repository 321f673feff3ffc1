"""The ``quark`` program. It prints every error as one paragraph and then exits with code 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quark.base.interrupts import termination_unwinds
from quark.base.log import shown, shown_lines
from quark.base.shortages import refuse_failed_import, shortage
from quark.base.version import VERSION, refuse_rival
from quark.errors import OutputError, QuarkError, RankError
from quark_workbench.cli import listing

if TYPE_CHECKING:
    import typer

__all__ = ["main", "program"]


def program() -> typer.Typer:
    """Return the typer program with the commands of all plugins."""
    # Imported here: importing typer takes longer than a whole listing, and listings do not need it.
    import typer

    from quark_workbench.cli.commands import CommandGroup

    app = typer.Typer(
        name="quark",
        cls=CommandGroup,
        help="Quantize language models. Schemes, formats, algorithms, templates and exporters are plugins: see `quark plugins`. "
        "With --debug, an error shows its traceback.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    version = typer.Option(False, "--version", is_eager=True, callback=_print_version, help="Print the version and stop.")

    @app.callback()
    def options(version: bool = version) -> None:
        """Handle the options that belong to ``quark`` itself and not to a command."""

    return app


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"quark {VERSION}")
        sys.exit()


def _sleep_while_waiting() -> None:
    """Let waiting OpenMP threads sleep soon, unless the environment sets ``OMP_WAIT_POLICY``.

    Call this before torch is imported.

    By default, a waiting thread runs a busy loop for milliseconds. On a busy machine, these loops take CPU
    time from the thread that still works, and a run takes many times as long.
    GNU's OpenMP, which torch uses, reads an environment variable with a spin count. Other implementations
    read only ``OMP_WAIT_POLICY``.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def main() -> None:
    """Run the program. If an error occurs, print one paragraph on stderr and exit with code 2.

    The traceback of the error is shown only with ``--debug``.
    """
    arguments, debug = _without_debug(sys.argv[1:])
    sys.argv[1:] = arguments
    _sleep_while_waiting()
    try:
        with termination_unwinds():
            refuse_rival()
            if not listing.answer(arguments):
                program()()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # such as a panic of a library in Rust, which is no Exception
        if debug:
            raise
        _print_error(error)
        sys.exit(2)


def _without_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Return the arguments without ``--debug``, and whether they had it. Arguments after ``--`` stay."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [a for i, a in enumerate(arguments) if i >= end or a != "--debug"], "--debug" in arguments[:end]


def _message(error: BaseException) -> str:
    """Return the message of an error, which also says how to fix the error."""
    message, advice = str(error), shortage(error)
    notes = [note for note in getattr(error, "__notes__", ()) if note != advice]
    if isinstance(error, QuarkError):
        return message if advice is None or isinstance(error, OutputError) else f"{message}. {advice}"
    begin = f"{type(error).__name__}: {' '.join(message.split())[:300]}".removesuffix(": ")
    known = "".join(f" {note[:1].upper()}{note[1:]}." for note in notes)
    if advice is not None:
        return f"{begin}.{known} {advice}"
    try:
        refuse_failed_import(error, "this does not work")
    except QuarkError as missing:
        return f"{missing}.{known}"
    # An unexpected error: a report of it needs the traceback.
    return f"{begin}.{known or ' This is a defect of quark or of a plugin.'} Run it again with --debug and report it"


def _print_error(error: BaseException) -> None:
    rank = os.environ.get("RANK", "0")
    if rank != "0" and isinstance(error, RankError) and error.is_told:
        return
    red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else ("", "")
    message = _message(error)
    whose = "" if rank == "0" else f" (rank {shown(rank)})"
    print(f"{red}quark{whose}: {shown_lines(message)}{plain}", file=sys.stderr)  # escaped, since it may quote a plugin or a file
