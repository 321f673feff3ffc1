"""The listing commands: ``quark plugins`` and ``quark formats|observers|schemes|algorithms|templates|exporters``.

They are what a shell completes from and what scripts ask in loops, so they are answered without the command-line library, which costs more
than all the rest of a listing; the commands are registered with it all the same, for ``--help`` and for errors in the arguments.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]


def register(app: typer.Typer) -> None:
    """Add the commands, one for plugins and one for each kind of thing they provide."""
    import typer  # the caller has it already

    option = typer.Option(False, "--json", help="Print everything that is known, as JSON.")

    def command_for(what: str) -> Callable[..., None]:
        def command(as_json: bool = option) -> None:
            show(what, as_json=as_json)

        return command

    app.command("plugins", help="List the plugins that are installed, what failed, and names claimed twice.")(command_for("plugins"))
    for kind in _COLUMNS:
        app.command(kind, help=f"List the {kind} of all plugins.")(command_for(kind))


def answer(arguments: Sequence[str]) -> bool:
    """Print a listing if these command-line arguments plainly ask for one; whether they did."""
    what, *options = arguments or [""]
    if what not in ("plugins", *_COLUMNS) or options not in ([], ["--json"]):
        return False
    try:
        show(what, as_json=bool(options))
        sys.stdout.flush()
    except BrokenPipeError:  # such as `quark schemes | head -1`; what is still buffered must not be tried again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def show(what: str, *, as_json: bool = False) -> None:
    """Print a listing.

    Args:
        what: ``"plugins"`` or a kind in the plural.
        as_json: As JSON rather than as a table.
    """
    from quark.plugins.report import kind_report, plugins_report

    catalog = _catalog()
    report = plugins_report(catalog) if what == "plugins" else kind_report(catalog, what)
    if as_json:
        print(json.dumps(report, indent=2))
        return
    if report[what]:
        _print_table(_PLUGIN_COLUMNS if what == "plugins" else (*_COLUMNS[what], *_COMMON), report[what])
    else:
        kinds = list(catalog.registries) if what == "plugins" else [what]
        wanted = dict.fromkeys(catalog.registries[kind].kind.distribution for kind in kinds)
        print(f"No {what} are installed. {catalog.missing(tuple(wanted))}".rstrip())
    _print_conflicts(report["conflicts"] if what == "plugins" else {what: report["conflicts"]})
    _print_failures(report["failures"])


def _catalog() -> Any:
    # Imported here: `quark --help` does without pluggy and the metadata of distributions. Failures are printed below the table instead.
    from quark.plugins import PluginWarning
    from quark.plugins.catalog import catalog

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        return catalog()


def _text(key: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(key) is None else str(row[key])


def _joined(key: str) -> Callable[[Row], str]:
    return lambda row: ", ".join(row.get(key) or ())


def _when(key: str, text: str) -> Callable[[Row], str]:
    return lambda row: text if row.get(key) else ""


def _number(key: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(key) is None else f"{row[key]:.4g}"


def _name(row: Row) -> str:
    return row["name"] if row["status"] == "active" else f"{row['source']['distribution']}:{row['name']}"


def _origin(row: Row) -> str:
    return f"{row['source']['distribution']} {row['source']['version']}".strip()


def _remarks(row: Row) -> str:
    remarks = [row["status"] if row["status"] != "active" else "", row["stability"] if row["stability"] != "stable" else ""]
    return "; ".join(filter(None, [*remarks, row.get("error", "")]))


_COMMON: tuple[Column, ...] = (
    ("aliases", _joined("aliases")),
    ("from", _origin),
    ("summary", _text("summary")),
    ("remarks", _remarks),
)
_COLUMNS: dict[str, tuple[Column, ...]] = {
    "formats": (("format", _name), ("bits", _number("bits"))),
    "observers": (("observer", _name), ("class", _text("class_name"))),
    "schemes": (
        ("scheme", _name),
        ("weight", _text("weight")),
        ("activations", _text("input")),
        ("bits", _number("effective_bits")),
        ("calibration", _when("needs_calibration", "needed")),
        ("KV cache", _when("kv_cache", "yes")),
        ("loaded by", _joined("clients")),
    ),
    "algorithms": (("algorithm", _name), ("kind", _text("kind")), ("runs", _when("configuration_only", "configuration only"))),
    "templates": (("template", _name), ("decoder blocks", _text("decoder_blocks")), ("left in float", _joined("exclude_layers_name"))),
    "exporters": (("exporter", _name), ("reads back", _when("reads_back", "yes"))),
}
_PLUGIN_COLUMNS: tuple[Column, ...] = (
    ("plugin", _text("entry_point")),
    ("distribution", _text("distribution")),
    ("version", _text("version")),
    ("module", _text("module")),
    ("provides", lambda row: ", ".join(f"{n} {kind if n > 1 else kind.removesuffix('s')}" for kind, n in row["provides"].items())),
    ("status", _text("status")),
)


def _print_table(columns: Sequence[Column], rows: Sequence[Row]) -> None:
    """A table of the columns that say something, fitted to a terminal; in a file or a pipe each row is one line, however long."""
    cells = [[show(row) for _, show in columns] for row in rows]
    used = [i for i in range(len(columns)) if any(line[i] for line in cells)]
    titles = [columns[i][0] for i in used]
    lines = [[line[i] for i in used] for line in cells]
    if sys.stdout.isatty():
        _print_fitted(titles, lines)
        return
    widths = [max(map(len, column)) for column in zip(titles, *lines, strict=True)]
    for line in (titles, ["-" * width for width in widths], *lines):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _print_fitted(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    from rich import box  # imported where a terminal is there to fit: other output does without
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, title in enumerate(titles):
        table.add_column(title, overflow="fold", no_wrap=i == 0)
    for line in lines:
        table.add_row(*map(Text, line))
    Console().print(table)


def _print_conflicts(conflicts: dict[str, dict[str, list[Row]]]) -> None:
    for kind, names in conflicts.items():
        for name, sources in names.items():
            claimants = " and ".join(f"{s['distribution']} {s['version']}" for s in sources)
            choice = " or ".join(f"{s['distribution']}:{name}" for s in sources)
            print(f"The name '{name}' ({kind}) is claimed by {claimants}: ask for {choice}.")


def _print_failures(failures: Sequence[Row]) -> None:
    for failure in failures:
        s = failure["source"]
        where = f"plugin '{s['entry_point']}' of {s['distribution']} {s['version']} ({s['module']})"
        print(f"{where} failed at stage '{failure['stage']}': {failure['error']}. Cure: {failure['cure']}")
