"""As much of JSON Schema as the schema of reports uses; what it does not know is an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
_KNOWN = {"$schema", "$defs", "$ref", "title", "description", "type", "required", "properties", "items", "enum", "oneOf"}


def violations(value: Any, schema: dict[str, Any], root: dict[str, Any] | None = None, path: str = "$") -> Iterator[str]:
    """Yield where a value differs from a schema."""
    root = root or schema
    assert not schema.keys() - _KNOWN, schema.keys() - _KNOWN
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    if "oneOf" in schema and sum(not list(violations(value, one, root, path)) for one in schema["oneOf"]) != 1:
        yield f"{path}: none or several of oneOf"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is not in {schema['enum']}"
    types = schema.get("type", [])
    if types and not any(_is(value, name) for name in ([types] if isinstance(types, str) else types)):
        yield f"{path}: {value!r} is not of type {types}"
    if isinstance(value, dict):
        yield from (f"{path}: '{key}' is missing" for key in schema.get("required", ()) if key not in value)
        for key, one in schema.get("properties", {}).items():
            if key in value:
                yield from violations(value[key], one, root, f"{path}.{key}")
    if isinstance(value, list) and "items" in schema:
        for i, item in enumerate(value):
            yield from violations(item, schema["items"], root, f"{path}[{i}]")


def _is(value: Any, name: str) -> bool:
    if name in ("integer", "number"):
        return isinstance(value, int if name == "integer" else int | float) and not isinstance(value, bool)
    return isinstance(value, _TYPES[name])
