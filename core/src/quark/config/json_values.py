"""Typed values of a JSON object: a value of another type is a ConfigError that names the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quark.errors import ConfigError

__all__ = ["checked", "strings_of", "value_of"]

_NAMES = {Mapping: "an object", list: "a list", str: "a string", bool: "true or false", int: "a whole number", float: "a number"}


def value_of(data: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """Return what stands under ``key``, ``default`` where nothing or null does.

    Args:
        data: From JSON.
        key: Into it.
        kind: Mapping, list (tuples count), str, bool, int, or float (whole numbers count).
        default: Of any type.

    Raises:
        ConfigError: It is of another type.
    """
    value = data.get(key)
    return default if value is None else checked(value, kind, key)


def strings_of(data: Mapping[str, Any], key: str) -> list[str]:
    """Return the list of strings under ``key``, empty where nothing or null is there.

    Raises ConfigError for anything else.
    """
    return [checked(v, str, key) for v in value_of(data, key, list, ())]


def checked(value: Any, kind: type, key: str) -> Any:
    """Return ``value``, which stands under ``key`` or in a list there.

    Raises ConfigError unless it is of that kind, as in `value_of`.
    """
    types: Any = {list: (list, tuple), float: (int, float)}.get(kind, kind)
    if isinstance(value, types) and (kind is bool or not isinstance(value, bool)):
        return value
    text = repr(value)
    raise ConfigError(f"'{key}' is {text if len(text) <= 80 else text[:80] + '…'}, where {_NAMES[kind]} is wanted")
