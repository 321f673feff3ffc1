"""Sizes in bytes, as people write them."""

from __future__ import annotations

import re

from quark.errors import ConfigError

__all__ = ["size_in_bytes"]

_UNITS = {"": 1, "B": 1} | {f"{prefix}B": 1000**i for i, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}IB": 1024**i for i, prefix in enumerate("KMGT", 1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def size_in_bytes(text: str, option: str) -> int:
    """Return the number of bytes that a text such as ``5GB`` (10⁹ bytes each) or ``512MiB`` (2²⁰ each) says.

    Args:
        text: A positive number, with or without a unit.
        option: The option that it is given for, for messages.

    Raises:
        ConfigError: It is no such size.

    Example:
        >>> size_in_bytes("1.5GB", "--max-shard-size"), size_in_bytes("2 MiB", "--max-shard-size"), size_in_bytes("700", "--max-shard-size")
        (1500000000, 2097152, 700)
    """
    match = _SIZE.fullmatch(text.strip())
    unit = match[2].upper() if match is not None else ""
    size = int(float(match[1]) * _UNITS[unit]) if match is not None and unit in _UNITS else 0
    if size < 1:
        raise ConfigError(f"{option} {text!r} is no size: give bytes, or a number and one of {', '.join(list(_UNITS)[1:])}, such as 5GB")
    return size
