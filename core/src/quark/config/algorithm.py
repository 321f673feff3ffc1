"""AlgoConfig: the base of every algorithm's configuration."""

from __future__ import annotations

from typing import Any, Self

import attrs

from quark.config.architecture import Architecture
from quark.config.fields import with_dataclass_view

__all__ = ["AlgoConfig", "StoredAlgoConfig"]


@with_dataclass_view
@attrs.define(kw_only=True)
class AlgoConfig:
    """Settings of one algorithm.

    Each algorithm's own class derives from it, in the plugin that brings the algorithm.

    Attributes:
        name: Registered name of the algorithm, as written to JSON.
    """

    name: str

    @classmethod
    def for_architecture(cls, architecture: Architecture) -> Self | None:
        """Return the settings for a model family, derived from its facts; None where there are none for it.

        By default they are the class's defaults, which fit every family. Algorithms that name layers override
        this.
        """
        return None if any(field.default is attrs.NOTHING for field in attrs.fields(cls)) else cls()  # type: ignore[call-arg]

    @classmethod
    def refusal(cls, architecture: Architecture) -> str | None:
        """Return why no settings can be derived for a family; None if they can, or if no reason is known."""
        return None

    def resolved(self) -> Self:
        """Return the settings with values in place of what stands for them, such as the defaults of a preset.

        A run has the algorithm of these settings, and its checkpoint states them. Resolved settings resolve
        to themselves.
        """
        return self

    def runs_with_model(self) -> bool:
        """Return whether the algorithm leaves modules that run with the model, which readers put back."""
        return False

    def separates_experts(self) -> bool:
        """Return whether the algorithm changes matrices of experts.

        Fused experts are then taken apart, also where they stay float.
        """
        return False

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: the fields as they are.

        Fields marked ``metadata={"legacy": True}`` are never written. Fields marked ``{"own": True}``, which
        AMD Quark's class does not have, are written only when they differ from their default, so that AMD
        Quark can read the file. Fields marked ``{"unused": True}`` are read and written, and nothing else:
        they are no options.
        """

        def is_written(attribute: Any, value: Any) -> bool:
            marks = attribute.metadata
            return not marks.get("legacy") and not (marks.get("own") and value == attribute.default)

        return attrs.asdict(self, filter=is_written)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> AlgoConfig:
        """Read the JSON form; raises TypeError for a field the class does not have."""
        return cls(**data)


@with_dataclass_view
@attrs.define(kw_only=True)
class StoredAlgoConfig(AlgoConfig):
    """Settings as a checkpoint stores them; reading it needs no algorithm to be installed.

    `quark.config.templates.algorithms.algo_config_from_dict` makes the algorithm's own class of
    ``to_dict()``.

    Attributes:
        settings: Everything but the name.
        is_run: Whether the checkpoint says that the algorithm runs with the model.
    """

    settings: dict[str, Any] = attrs.field(factory=dict)
    is_run: bool = False

    def runs_with_model(self) -> bool:
        """Return whether the checkpoint says so; checkpoints of other producers do not say it."""
        return self.is_run

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, as it was read."""
        return {"name": self.name, **self.settings}

    @classmethod
    def from_dict(cls, data: dict[str, Any], *, is_run: bool = False) -> StoredAlgoConfig:
        """Keep the JSON form."""
        settings = {key: value for key, value in data.items() if key != "name"}
        return cls(name=str(data.get("name", "")), settings=settings, is_run=is_run)
