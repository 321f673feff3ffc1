"""Settings."""
from __future__ import annotations
import attrs
from typing import Any
from quark.config.algorithm import AlgoConfig
from quark.config.dataclass_view import with_dataclass_view

@with_dataclass_view
@attrs.define(kw_only=True)
class TuningConfig(AlgoConfig):
    name: str = "tuning"
    steps: int = 60
