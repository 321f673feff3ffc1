"""Fields of configuration classes: their view as dataclasses, and type checks of their JSON values."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs

from quark.base.files import regular_bytes
from quark.errors import ConfigError

T = TypeVar("T")


def with_dataclass_view(cls: type[T]) -> type[T]:
    """Give an attrs class the field table that functions of the standard library's ``dataclasses`` need.

    The table comes from a shadow dataclass with the same fields, so that only public functions are used.

    Example:
        >>> @with_dataclass_view
        ... @attrs.frozen
        ... class Point:
        ...     x: int = 0
        >>> dataclasses.replace(Point(1), x=2)
        Point(x=2)
    """
    rows: list[tuple[str, Any, Any]] = []
    for a in attrs.fields(cls):  # type: ignore[arg-type]
        spec: dict[str, Any] = {"init": a.init, "kw_only": True}
        if isinstance(a.default, attrs.Factory):  # type: ignore[arg-type]
            spec["default_factory"] = a.default.factory
        elif a.default is not attrs.NOTHING:
            spec["default_factory"] = lambda value=a.default: value
        rows.append((a.name, Any, dataclasses.field(**spec)))
    shadow = dataclasses.make_dataclass(cls.__name__, rows)
    cls.__dataclass_fields__ = shadow.__dataclass_fields__  # type: ignore[attr-defined]
    return cls


def one_of(*choices: str) -> Callable[[Any, Any, Any], None]:
    """Return an attrs validator that raises ConfigError for other values."""

    def validate(_: Any, attribute: Any, value: Any) -> None:
        if value not in choices:
            raise ConfigError(f"{attribute.name}={value!r}: use one of {', '.join(choices)}")

    return validate


_NAMES = {Mapping: "an object", list: "a list", str: "a string", bool: "true or false", int: "a whole number", float: "a number"}


def json_of(path: Path, what: str) -> Any:
    """Return the value of a JSON file.

    Args:
        path: The file.
        what: Kind of file, for messages: ``"template file"``.

    Raises:
        ConfigError: The file cannot be read, or is not JSON.
    """
    try:
        return json.loads(regular_bytes(path).decode("utf-8"))
    except RecursionError:
        raise ConfigError(f"the {what} '{path}' is nested too deeply: correct it") from None
    except OSError as error:
        raise ConfigError(f"the {what} '{path}' cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"the {what} '{path}' is not JSON: {error}") from error


def value_of(data: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """Return the value of ``key``, or ``default`` if it is missing or null.

    Args:
        data: A JSON object.
        key: A key of it.
        kind: Mapping, list (tuples count), str, bool, int, or float (whole numbers count).
        default: A value of any type.

    Raises:
        ConfigError: The value has another type.
    """
    value = data.get(key)
    return default if value is None else checked(value, kind, key)


def strings_of(data: Mapping[str, Any], key: str) -> list[str]:
    """Return the list of strings of ``key``; empty if it is missing or null.

    Raises ConfigError for anything else.
    """
    return [checked(v, str, key) for v in value_of(data, key, list, ())]


def checked(value: Any, kind: type, key: str) -> Any:
    """Return ``value``, which belongs to ``key``; raise ConfigError if it has another type.

    The kinds are as in `value_of`.
    """
    types: Any = {list: (list, tuple), float: (int, float)}.get(kind, kind)
    if isinstance(value, types) and (kind is bool or not isinstance(value, bool)):
        return value
    text = repr(value)
    raise ConfigError(f"'{key}' is {text if len(text) <= 80 else text[:80] + '…'} instead of {_NAMES[kind]}")
