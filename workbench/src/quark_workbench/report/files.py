"""The files of a report: ``quark_report.json`` and ``quark_report.html`` in the directory of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import UndefinedError

from quark.base.files import replace_text
from quark.calibration.report import CalibrationReport
from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.destination import REPORT_FILES
from quark.errors import CheckpointError
from quark.models.hf.json_files import read_json
from quark_workbench.report.contents import FORMAT, FORMAT_VERSION, Facts, contents_of, with_flags
from quark_workbench.report.page import page

__all__ = ["read_report", "report_schema", "violations", "write_contents", "write_report"]

_JSON, _HTML = REPORT_FILES


def write_report(content: CheckpointContent, report: CalibrationReport, directory: Path, facts: Facts) -> dict[str, Any]:
    """Write both files of a report into a checkpoint's directory, and return what `contents_of` returns."""
    contents = contents_of(content, report, directory, facts)
    write_contents(contents, directory)
    return contents


def write_contents(contents: dict[str, Any], directory: Path) -> None:
    """Write a report's contents as JSON and as a page. Earlier files or links of these names are replaced."""
    text, html = json.dumps(contents, indent=1, allow_nan=False, ensure_ascii=False) + "\n", page(contents)
    replace_text(directory / _JSON, text)
    replace_text(directory / _HTML, html)


def read_report(directory: Path) -> dict[str, Any] | None:
    """Return the contents of a checkpoint's report, or None if the checkpoint has no report.

    Raises:
        CheckpointError: The file is damaged, or has another version of the format.
    """
    path = directory / _JSON
    if not path.is_file():
        return None
    contents = read_json(path)
    if contents.get("format") != FORMAT or contents.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"'{path}' is not a report of format {FORMAT} {FORMAT_VERSION}: another version wrote it. Remove it, and run quark report "
            f"--float MODEL"
        )
    if error := next(violations(contents), None) or _why_no_page(contents):
        raise CheckpointError(f"'{path}' is damaged: {error}. Remove it, and run quark report --float MODEL")
    return contents


def _why_no_page(contents: dict[str, Any]) -> str | None:
    """Return why no page can be made of a report's contents, or None if a page can be made.

    A change by hand that the schema allows can be a reason.
    """
    try:
        page(with_flags(contents))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, UndefinedError) as error:
        return f"no page can be made of it ({type(error).__name__}: {error})"
    return None


_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}
_REFERENCE = "#/$defs/"


@cache
def report_schema() -> dict[str, Any]:
    """Return the schema of ``quark_report.json``."""
    schema: dict[str, Any] = json.loads((files("quark_workbench.report") / "schema.json").read_text(encoding="utf-8"))
    return schema


def violations(value: Any, schema: Mapping[str, Any] | None = None, path: str = "report") -> Iterator[str]:
    """Yield a message for each place at which a value violates a schema.

    Args:
        value: Any JSON value.
        schema: A part of `report_schema`; None for the whole schema. The keywords ``type``, ``enum``,
            ``oneOf``, ``required``, ``properties``, ``items`` and ``$ref`` are checked.
        path: Position of the value, for messages.
    """
    schema = report_schema() if schema is None else schema
    if "$ref" in schema:
        schema = report_schema()["$defs"][schema["$ref"].removeprefix(_REFERENCE)]
    types = schema.get("type", ())
    if types and not any(_is(value, name) for name in ((types,) if isinstance(types, str) else types)):
        yield f"{path} is a {type(value).__name__}, not {types}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path} must be one of {schema['enum']}"
    if "oneOf" in schema and sum(not any(violations(value, one, path)) for one in schema["oneOf"]) != 1:
        yield f"{path} has none of its allowed forms"
    if isinstance(value, dict):
        yield from (f"{path} has no '{key}'" for key in schema.get("required", ()) if key not in value)
        for key, one in schema.get("properties", {}).items():
            if key in value:
                yield from violations(value[key], one, f"{path}.{key}")
    if isinstance(value, list) and "items" in schema:
        for i, item in enumerate(value):
            yield from violations(item, schema["items"], f"{path}[{i}]")


def _is(value: Any, name: str) -> bool:
    """Return whether a value has the type that JSON Schema calls ``name``. True and false are not numbers."""
    return isinstance(value, _TYPES[name]) and (not isinstance(value, bool) or name == "boolean")
