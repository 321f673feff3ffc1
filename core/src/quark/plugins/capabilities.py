"""Capabilities: what a record may say of itself beyond its fields, as plain strings. `CAPABILITIES` is the whole list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from quark.names import closest

__all__ = ["CAPABILITIES", "unknown_capability"]

CAPABILITIES: Mapping[str, str] = MappingProxyType(
    {
        "calibration": "algorithms: it measures the inputs of layers, so a run needs calibration data",
        "streaming": "exporters: it writes one decoder block at a time, so the model need not fit in memory",
        "zero_point": "formats: it has zero points, so a range may be asymmetric",
    }
)
"""Every capability that a record may declare: the kind of record that has it, and what it means."""


def unknown_capability(names: Iterable[object]) -> str | None:
    """Say which of the names is no capability, and which are; None where all are.

    >>> unknown_capability(["streaming"])
    >>> unknown_capability(["steaming"])
    "'steaming' is no capability; did you mean 'streaming'? There are calibration, streaming, zero_point"
    """
    unknown = next((name for name in names if name not in CAPABILITIES), None)
    if unknown is None:
        return None
    near = closest(str(unknown), CAPABILITIES)
    return f"{unknown!r} is no capability{f'; did you mean {near!r}?' if near else '.'} There are {', '.join(CAPABILITIES)}"
