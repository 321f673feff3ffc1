"""Functions that read option values (sizes, ``KEY=VALUE`` texts), and a decorator for groups of options."""

from __future__ import annotations

import functools
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

from quark.errors import ConfigError
from quark_workbench.commands.event_lines import event_lines

__all__ = ["command", "given_algorithm_options", "given_options", "size_in_bytes"]


def given_options(flag: str, texts: Iterable[str] | None) -> dict[str, Any]:
    """Return ``KEY=VALUE`` texts as a dictionary from key to value.

    Args:
        flag: The command-line option, for messages: ``"--scheme-option"``.
        texts: The arguments of that option; None if the user does not give the option.

    Raises:
        ConfigError: A text has another form, or a key occurs twice.
    """
    options: dict[str, Any] = {}
    for text in texts or ():
        key, value = _pair(flag, text, "KEY=VALUE, such as block_size=32")
        _put(options, key, value, flag)
    return options


def given_algorithm_options(flag: str, texts: Iterable[str] | None) -> dict[str, dict[str, Any]]:
    """Return a dictionary from the name of an algorithm to a dictionary of its options.

    The arguments and the errors are as in `given_options`.
    """
    options: dict[str, dict[str, Any]] = {}
    form = "NAME.KEY=VALUE, such as gptq.damp_percent=0.05"
    for text in texts or ():
        path, value = _pair(flag, text, form)
        name, _, key = path.rpartition(".")
        if not (name and key):
            raise ConfigError(f"{flag} {text!r} is not {form}")
        _put(options.setdefault(name, {}), key, value, flag)
    return options


def _pair(flag: str, text: str, form: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    if not (key and value):
        raise ConfigError(f"{flag} {text!r} is not {form}")
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):
        return key, value


def _put(options: dict[str, Any], key: str, value: Any, flag: str) -> None:
    if key in options:
        raise ConfigError(f"{flag} is given twice for '{key}': leave one out")
    options[key] = value


_UNITS = {"": 1, "B": 1} | {f"{prefix}B": 1000**i for i, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}IB": 1024**i for i, prefix in enumerate("KMGT", 1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def size_in_bytes(text: str, option: str) -> int:
    """Return the number of bytes of a size such as ``5GB`` or ``512MiB``.

    GB is 10⁹ bytes, and MiB is 2²⁰ bytes.

    Args:
        text: A positive number, with or without a unit.
        option: The command-line option, for messages.

    Raises:
        ConfigError: The text is not a size.

    Example:
        >>> [size_in_bytes(text, "--max-shard-size") for text in ("1.5GB", "2 MiB", "700")]
        [1500000000, 2097152, 700]
    """
    match = _SIZE.fullmatch(text.strip())
    unit = match[2].upper() if match is not None else ""
    size = int(float(match[1]) * _UNITS[unit]) if match is not None and unit in _UNITS else 0
    if size < 1:
        raise ConfigError(f"{option} {text!r} is not a size: give bytes, or a number and one of {', '.join(list(_UNITS)[1:])}, such as 5GB")
    return size


def command(task: str | None = None, /, **groups: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces an argument of a command with a group of options.

    A function defines each group: its arguments become options of the command, and the command gets the
    function's result.

    Args:
        task: The kind of work whose events ``--json`` prints (see `event_lines`); None if the command starts
            no run.
        groups: The functions. Each keyword is the name of the argument of the command that is replaced.

    Example:
        >>> def size(width: int = 2, height: int = 3):
        ...     return width, height
        >>> @command(size=size)
        ... def draw(text: str, size: object) -> None:
        ...     print(text, size)
        >>> draw(text="box", width=5)
        box (5, 3)
    """
    of_groups = {name: _parameters(read) for name, read in groups.items()}

    def decorator(function: Callable[..., None]) -> Callable[..., None]:
        every = [p for parameter in _parameters(function) for p in of_groups.get(parameter.name, [parameter])]

        @functools.wraps(function)
        def called(**values: Any) -> None:
            with nullcontext() if task is None else event_lines(task, values):
                for name, parameters in of_groups.items():
                    values[name] = groups[name](**{p.name: values.pop(p.name) for p in parameters if p.name in values})
                function(**values)

        called.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
        return called

    return decorator


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function as keyword-only parameters. Their annotations are evaluated."""
    hints = typing.get_type_hints(function, include_extras=True)
    return [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints.get(name, parameter.annotation))
        for name, parameter in inspect.signature(function).parameters.items()
    ]
