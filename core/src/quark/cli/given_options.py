"""Options of schemes, algorithms and exporters from the command line: ``KEY=VALUE``, with a JSON value or else a plain string."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from quark.errors import ConfigError

__all__ = ["given_algorithm_options", "given_options"]


def given_options(flag: str, texts: Iterable[str] | None) -> dict[str, Any]:
    """Return the values of ``KEY=VALUE`` texts by key.

    Args:
        flag: The option of the command line, for messages: ``"--scheme-option"``.
        texts: The arguments of that option; None for none.

    Raises:
        ConfigError: A text has another form, or a key occurs twice.
    """
    options: dict[str, Any] = {}
    for text in texts or ():
        key, value = _pair(flag, text, "KEY=VALUE, such as block_size=32")
        _put(options, key, value, flag)
    return options


def given_algorithm_options(flag: str, texts: Iterable[str] | None) -> dict[str, dict[str, Any]]:
    """Return the values of ``NAME.KEY=VALUE`` texts by algorithm and key; otherwise as `given_options`."""
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
