"""The listing commands: ``quark plugins`` and one for each kind, such as ``quark schemes``.

Shell completion and scripts call these commands often. This module therefore runs them without typer, since
importing typer takes longer than printing the listing. For ``--help`` and wrong arguments,
`quark_workbench.cli.listing_commands` defines the same commands with typer.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from quark.base.log import shown
from quark_workbench.cli.tables import paragraphs, table, terminal_width

if TYPE_CHECKING:
    from quark.plugins import Catalog
    from quark.plugins.options import Option

__all__ = ["Column", "Row", "answer", "show"]

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]


def answer(arguments: Sequence[str]) -> bool:
    """Print a listing if the arguments ask for a listing. Return whether they do."""
    what, *rest = arguments or [""]
    names = [text for text in rest if text != "--json"]
    plain = rest.count("--json") <= 1 and len(names) <= (what != "plugins") and not any(name.startswith("-") for name in names)
    if what not in ("plugins", *_COLUMNS) or not plain or what in _catalog().commands:  # a plugin may replace a listing
        return False
    try:
        show(what, as_json="--json" in rest, name=names[0] if names else None)
        sys.stdout.flush()
    except OSError as error:  # such as `quark schemes | head -1`; Python must not write the buffer again at exit
        if error.errno not in (errno.EPIPE, errno.EINVAL):  # Windows reports a broken pipe as EINVAL
            raise
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())
    return True


def show(what: str, *, as_json: bool = False, name: str | None = None) -> None:
    """Print a listing.

    Args:
        what: ``"plugins"`` or a kind in the plural.
        as_json: Whether to print JSON instead of a table.
        name: The name of one record, which is shown with its options. None shows a table of all records.

    Raises:
        UnknownNameError: (a ValueError) No record has that name.
    """
    from quark.plugins.discovery import CORE
    from quark_workbench.cli.installed import kind_report, plugins_report, record_report

    with redirect_stdout(sys.stderr):  # keep what plugins print out of the listing
        catalog = _catalog()
        if name is not None:
            report = record_report(catalog, what, name)
            report["options"] = [option.to_dict() for option in _options(what, report["name"])]
        else:
            report = plugins_report(catalog) if what == "plugins" else kind_report(catalog, what)
    if name is not None:
        print(json.dumps(report, indent=2)) if as_json else _print_one(report)
        return
    if as_json:
        print(json.dumps(report, indent=2))
        return
    rows = report[what]
    if rows and not (what == "plugins" and all(row["distribution"] == CORE for row in rows)):
        _print_table(_PLUGIN_COLUMNS if what == "plugins" else (*_COLUMNS[what], *_COMMON), rows, what)
    else:
        kinds = list(catalog.registries) if what == "plugins" else [what]
        distributions = dict.fromkeys(catalog.registries[kind].kind.distribution for kind in kinds)
        print(f"No {what} are installed. {catalog.missing(tuple(distributions))}".rstrip())
    _print_conflicts(report["conflicts"] if what == "plugins" else {what: report["conflicts"]})
    _print_failures(report["failures"])


def _options(what: str, name: str) -> Sequence[Option]:
    if what == "exporters":
        from quark.checkpoint.export import exporter_options  # imports torch, which the other kinds do not need

        return exporter_options(name)
    return _catalog().registries[what].options(name)


def _catalog() -> Catalog:
    # Imported here: `quark --help` needs neither pluggy nor the metadata of distributions. Failures are
    # printed below the table instead.
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


def _remarks(row: Row) -> str:
    remarks = [row["status"] if row["status"] != "active" else "", row["stability"] if row["stability"] != "stable" else ""]
    return "; ".join(filter(None, [*remarks, row.get("error", "")]))


_COMMON: tuple[Column, ...] = (
    ("remarks", _remarks),
    ("summary", _text("summary")),
    ("from", lambda row: f"{row['source']['distribution']} {row['source']['version']}".strip()),
    ("aliases", _joined("aliases")),
)
_ALONE: tuple[Column, ...] = (
    ("stability", _text("stability")),
    ("capabilities", _joined("capabilities")),
    ("plugin API", lambda row: "" if row["api"] is None else " to ".join(map(str, dict.fromkeys(row["api"])))),
)
"""Fields that only the listing of a single record shows."""
_FLAGS = {
    "observers": "observer_options={{'KEY': VALUE}} of a QTensorConfig",
    "schemes": "--scheme-option KEY=VALUE",
    "algorithms": "--algorithm-option {name}.KEY=VALUE",
    "exporters": "--exporter-option KEY=VALUE",
    "selectors": "--selector-option KEY=VALUE",
    "datasets": "--calib-option KEY=VALUE",
}
"""Dictionary from kind of record to a text that says how to set its options. Other kinds have no options."""
_COLUMNS: dict[str, tuple[Column, ...]] = {
    "formats": (("format", _name), ("bits", _number("bits"))),
    "observers": (("observer", _name), ("class", _text("class_name"))),
    "schemes": (
        ("scheme", _name),
        ("bits", _number("effective_bits")),
        ("weight", _text("weight")),
        ("activations", _text("input")),
        ("calibration", _when("needs_calibration", "needed")),
        ("KV cache", _when("kv_cache", "yes")),
        ("loaded by", _joined("clients")),
    ),
    "algorithms": (
        ("algorithm", _name),
        ("kind", _text("kind")),
        ("role", _text("role")),
        ("before", _joined("before")),
        ("after", _joined("after")),
        ("runs", _when("configuration_only", "configuration only")),
    ),
    "templates": (("template", _name), ("decoder blocks", _text("decoder_blocks")), ("left in float", _joined("exclude_layers_name"))),
    "layer_types": (
        ("layer type", _name),
        ("layer", _text("layer")),
        ("quantized", _text("quantized")),
        ("as", _text("planned_as")),
    ),
    "exporters": (
        ("exporter", _name),
        ("writes", _when("exporter", "yes")),
        ("loads", _when("reader", "yes")),
        ("source", _when("dequantizer", "yes")),
        ("quant_method", _joined("quant_methods")),
    ),
    "selectors": (("selector", _name),),
    "datasets": (("dataset", _name), ("files", _joined("suffixes")), ("downloaded", _when("is_online", "yes"))),
    "metrics": (("metric", _name), ("reference model", _when("needs_reference", "needed"))),
    "quant_modes": (("quantization mode", _name),),
    "graph_ops": (("operator", _name), ("modules", _joined("modules")), ("moves values", _when("moves_values", "yes"))),
    "commands": (("command", _name), ("heading", _text("group"))),
}
_PLUGIN_COLUMNS: tuple[Column, ...] = (
    ("plugin", _text("entry_point")),
    ("distribution", _text("distribution")),
    ("version", _text("version")),
    ("module", _text("module")),
    ("provides", lambda row: ", ".join(f"{n} {kind if n > 1 else kind.removesuffix('s')}" for kind, n in row["provides"].items())),
    ("status", _text("status")),
)


def _print_table(columns: Sequence[Column], rows: Sequence[Row], what: str) -> None:
    """Print a table without empty columns.

    In a terminal, print only the columns that fit, and then a line that says how to see the other columns.
    """
    width = terminal_width()
    lines, left_out = table([title for title, _ in columns], [[cell(row) for _, cell in columns] for row in rows], width)
    print("\n".join(lines))
    if width is not None:
        more = [f"not shown: {', '.join(left_out)}"] if left_out else []
        more += [f"one in full: quark {what} NAME"] if what != "plugins" else []
        print(*textwrap.wrap(f"({'; '.join([*more, 'everything: --json'])})", width), sep="\n")


def _print_one(report: Row) -> None:
    """Print the fields of a single record, and its options with their help texts."""
    width, what, row = terminal_width(), report["kind"], report["entry"]
    print(shown(f"{report['name']}: {row['summary']}"))
    facts = [(title, cell(row)) for title, cell in (*_COLUMNS[what][1:], *_COMMON, *_ALONE) if title != "summary"]
    size = max(len(title) for title, _ in facts)
    print(*(shown(f"  {title.ljust(size)}  {text}") for title, text in facts if text), sep="\n")
    flag = _FLAGS.get(what)
    if flag is None:
        return
    options = report["options"]
    print(f"Options ({flag.format(name=report['name'])}):" if options else "It has no options.")
    heads = [f"{o['name']}: {o['type']}" + ("" if o["required"] else f" = {json.dumps(o['default'])}") for o in options]
    print(*paragraphs(list(zip(heads, (o["help"] for o in options), strict=True)), width), sep="\n", end="\n" if options else "")


def _print_conflicts(conflicts: dict[str, dict[str, list[Row]]]) -> None:
    for kind, names in conflicts.items():
        for name, sources in names.items():
            claimants = " and ".join(f"{s['distribution']} {s['version']}" for s in sources)
            choice = " or ".join(f"{s['distribution']}:{name}" for s in sources)
            print(shown(f"The name '{name}' ({kind}) is claimed by {claimants}. Use {choice}."))


def _print_failures(failures: Sequence[Row]) -> None:
    for failure in failures:
        s = failure["source"]
        where = f"plugin '{s['entry_point']}' of {s['distribution']} {s['version']} ({s['module']})"
        print(shown(f"{where} failed at stage '{failure['stage']}': {failure['error']}. Fix: {failure['fix']}"))
