"""The schema of reports, ``schema.json``, and as much of JSON Schema as it uses: files of reports may be damaged, or changed by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = ["report_schema", "violations"]

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
    """Yield where a value differs from a schema, in words; the default is that of a report.

    Args:
        value: Any JSON value.
        schema: A part of `report_schema`; of JSON Schema's keywords ``type``, ``enum``, ``oneOf``,
            ``required``, ``properties``, ``items`` and ``$ref`` are obeyed.
        path: Where the value is, for the messages.
    """
    schema = report_schema() if schema is None else schema
    if "$ref" in schema:
        schema = report_schema()["$defs"][schema["$ref"].removeprefix(_REFERENCE)]
    types = schema.get("type", ())
    if types and not any(_is(value, name) for name in ((types,) if isinstance(types, str) else types)):
        yield f"{path} is a {type(value).__name__}, not {types}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path} is none of {schema['enum']}"
    if "oneOf" in schema and sum(not any(violations(value, one, path)) for one in schema["oneOf"]) != 1:
        yield f"{path} has none of the forms that it may have"
    if isinstance(value, dict):
        yield from (f"{path} has no '{key}'" for key in schema.get("required", ()) if key not in value)
        for key, one in schema.get("properties", {}).items():
            if key in value:
                yield from violations(value[key], one, f"{path}.{key}")
    if isinstance(value, list) and "items" in schema:
        for i, item in enumerate(value):
            yield from violations(item, schema["items"], f"{path}[{i}]")


def _is(value: Any, name: str) -> bool:
    """Return whether a value is of a type of JSON Schema, where true and false are no numbers."""
    return isinstance(value, _TYPES[name]) and (not isinstance(value, bool) or name == "boolean")
