"""Functions for the fields of configuration classes, and functions that read and check JSON values."""

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
    """Make the functions of the standard module ``dataclasses`` work for an attrs class. Return the class.

    The function creates a dataclass with the same fields, and copies its table of fields to the attrs class.
    So it calls only public functions of ``dataclasses``.

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
    """Return an attrs validator. It raises ConfigError if a value is not in ``choices``."""

    def validate(_: Any, attribute: Any, value: Any) -> None:
        if value not in choices:
            raise ConfigError(f"{attribute.name}={value!r}: use one of {', '.join(choices)}")

    return validate


_NAMES = {Mapping: "an object", list: "a list", str: "a string", bool: "true or false", int: "a whole number", float: "a number"}


def json_of(path: Path, what: str) -> Any:
    """Read a JSON file and return its value.

    Args:
        path: Path of the file.
        what: Kind of the file, such as ``"template file"``. Messages contain it.

    Raises:
        ConfigError: The file cannot be read, or does not contain JSON.
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
    """Return the value of ``key`` in ``data``, or ``default`` if the key is missing or its value is None.

    Args:
        data: A JSON object.
        key: Key of the value.
        kind: Type of the value: Mapping, list, str, bool, int or float. A tuple also counts as a list, and an
            int also counts as a float.
        default: A value of any type.

    Raises:
        ConfigError: The value does not have the type ``kind``.
    """
    value = data.get(key)
    return default if value is None else checked(value, kind, key)


def strings_of(data: Mapping[str, Any], key: str) -> list[str]:
    """Return the value of ``key``, a list of strings. Return [] if the key is missing or the value is None.

    Raise ConfigError if the value is not a list of strings.
    """
    return [checked(v, str, key) for v in value_of(data, key, list, ())]


def checked(value: Any, kind: type, key: str) -> Any:
    """Return ``value``. If it does not have the type ``kind``, raise a ConfigError that names ``key``.

    The description of `value_of` lists the types that ``kind`` can be.
    """
    types: Any = {list: (list, tuple), float: (int, float)}.get(kind, kind)
    if isinstance(value, types) and (kind is bool or not isinstance(value, bool)):
        return value
    text = repr(value)
    raise ConfigError(f"'{key}' is {text if len(text) <= 80 else text[:80] + '…'} instead of {_NAMES[kind]}")
