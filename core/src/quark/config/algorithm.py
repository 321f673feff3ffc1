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
    """Settings of one algorithm: the base of each algorithm's own class.

    Attributes:
        name: Registered name of the algorithm, as written to JSON.
    """

    name: str

    @classmethod
    def for_architecture(cls, architecture: Architecture) -> Self | None:
        """Return the settings for a model family, derived from its facts; None if it has none.

        By default these are the class's defaults, which fit every family. Algorithms that name layers
        override this.
        """
        return None if any(field.default is attrs.NOTHING for field in attrs.fields(cls)) else cls()  # type: ignore[call-arg]

    @classmethod
    def refusal(cls, architecture: Architecture) -> str | None:
        """Return why no settings can be derived for a family; None if they can, or if no reason is known."""
        return None

    def resolved(self) -> Self:
        """Return the settings with placeholders, such as the defaults of a preset, replaced by values.

        A run and its checkpoint use these settings. Resolved settings resolve to themselves.
        """
        return self

    def runs_with_model(self) -> bool:
        """Return whether the algorithm leaves modules that run with the model, which readers restore."""
        return False

    def separates_experts(self) -> bool:
        """Return whether the algorithm changes matrices of experts.

        Fused experts are then separated, even if they stay float.
        """
        return False

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form of the fields.

        Marks in the ``metadata`` of a field change this. ``{"legacy": True}``: never written.
        ``{"own": True}``, for fields that AMD Quark's class lacks: written only if the value is not the
        default, so that AMD Quark can read the file. ``{"unused": True}``: read and written, but no option.
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
    """Settings as a checkpoint stores them; reading them needs no installed algorithm.

    `quark.config.templates.algorithms.algo_config_from_dict` turns ``to_dict()`` into the algorithm's own
    class.

    Attributes:
        settings: Everything but the name.
        is_run: Whether the checkpoint says that the algorithm runs with the model.
    """

    settings: dict[str, Any] = attrs.field(factory=dict)
    is_run: bool = False

    def runs_with_model(self) -> bool:
        """Return ``is_run``, which is False for checkpoints of other producers."""
        return self.is_run

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form as it was read."""
        return {"name": self.name, **self.settings}

    @classmethod
    def from_dict(cls, data: dict[str, Any], *, is_run: bool = False) -> StoredAlgoConfig:
        """Keep the JSON form."""
        settings = {key: value for key, value in data.items() if key != "name"}
        return cls(name=str(data.get("name", "")), settings=settings, is_run=is_run)
