"""AlgoConfig: the base of every algorithm's configuration."""

from __future__ import annotations

from typing import Any

import attrs

from quark.specs.architecture import Architecture
from quark.specs.dataclass_view import with_dataclass_view


@with_dataclass_view
@attrs.define(kw_only=True)
class AlgoConfig:
    """Settings of one algorithm. Each algorithm's own class derives from it, in the plugin that brings the algorithm.

    Attributes:
        name: Registered name of the algorithm, as written to JSON.
    """

    name: str

    @classmethod
    def for_architecture(cls, architecture: Architecture) -> AlgoConfig | None:
        """The settings for a model family, derived from its facts; None where the algorithm derives none. Algorithms override this."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """JSON form: the fields as they are, but for those marked ``metadata={"legacy": True}``."""
        return attrs.asdict(self, filter=lambda attribute, _: not attribute.metadata.get("legacy"))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> AlgoConfig:
        """Read the JSON form; raises TypeError for a field the class does not have."""
        return cls(**data)


@with_dataclass_view
@attrs.define(kw_only=True)
class StoredAlgoConfig(AlgoConfig):
    """Settings as a checkpoint holds them, kept word for word: reading a checkpoint needs no algorithm to be installed.

    `quark.templates.algorithms.algo_config_from_dict` makes the algorithm's own class of ``to_dict()``.

    Attributes:
        settings: Everything but the name.
    """

    settings: dict[str, Any] = attrs.field(factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON form, as it was read."""
        return {"name": self.name, **self.settings}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> StoredAlgoConfig:
        """Keep the JSON form."""
        return cls(name=str(data.get("name", "")), settings={key: value for key, value in data.items() if key != "name"})
