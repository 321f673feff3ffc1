"""Event: something that happened during a run, as plugins hear of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs

__all__ = ["Event"]


def _read_only(payload: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(payload))


@attrs.frozen
class Event:
    """Something that happened.

    Attributes:
        name: What, such as ``"run_started"``, ``"block_finished"``, ``"run_finished"``. Listeners ignore names they do not know.
        payload: Facts about it, read-only; which keys there are depends on the name, and later versions may add some.
    """

    name: str
    payload: Mapping[str, Any] = attrs.field(factory=dict, converter=_read_only, hash=False)
