"""AlgoConfig: the base of every algorithm's configuration."""

from __future__ import annotations

from typing import Any

import attrs


@attrs.define(kw_only=True)
class AlgoConfig:
    """Settings of one algorithm. Each algorithm's own class derives from it, in the plugin that brings the algorithm.

    Attributes:
        name: Registered name of the algorithm, as written to JSON.
    """

    name: str

    def to_dict(self) -> dict[str, Any]:
        """JSON form: the fields as they are."""
        return attrs.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> AlgoConfig:
        """Read the JSON form; raises TypeError for a field the class does not have."""
        return cls(**data)
