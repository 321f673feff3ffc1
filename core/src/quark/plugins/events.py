"""Events: what the pipeline tells whoever listens."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs


@attrs.frozen
class Event:
    """Something that happened in a run.

    Attributes:
        name: Such as ``"run_started"``, ``"block_finished"``, ``"run_finished"``.
        payload: Facts about it, read-only.
    """

    name: str
    payload: Mapping[str, Any] = attrs.field(factory=dict, converter=lambda p: MappingProxyType(dict(p)))
