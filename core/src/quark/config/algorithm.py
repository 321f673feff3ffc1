"""`AlgoConfig` is the base class of the settings of every algorithm."""

from __future__ import annotations

from typing import Any, Self

import attrs

from quark.config.architecture import Architecture
from quark.config.fields import with_dataclass_view

__all__ = ["AlgoConfig", "StoredAlgoConfig"]


@with_dataclass_view
@attrs.define(kw_only=True)
class AlgoConfig:
    """Base class of the settings of an algorithm. Each algorithm has its own subclass.

    Attributes:
        name: Registered name of the algorithm. The JSON form contains it.
    """

    name: str

    @classmethod
    def for_architecture(cls, architecture: Architecture) -> Self | None:
        """Return the settings for a model family, or None if they cannot be derived from ``architecture``.

        The base class returns the default settings of the class, or None if a field has no default. If the
        settings of an algorithm name layers, the algorithm's subclass overrides this method.
        """
        return None if any(field.default is attrs.NOTHING for field in attrs.fields(cls)) else cls()  # type: ignore[call-arg]

    @classmethod
    def refusal(cls, architecture: Architecture) -> str | None:
        """Return the reason why no settings can be derived for a model family.

        Return None if settings can be derived, or if no reason is known.
        """
        return None

    def resolved(self) -> Self:
        """Return the settings with final values in all fields.

        For example, fields that are not set get the default of a preset. A run uses the resolved settings,
        and the checkpoint contains them. If the settings are already resolved, the result equals them.
        """
        return self

    def runs_with_model(self) -> bool:
        """Return whether the algorithm adds modules that run as part of the quantized model.

        Programs that load the checkpoint must restore these modules.
        """
        return False

    def separates_experts(self) -> bool:
        """Return whether the algorithm changes the matrices of each expert separately.

        If so, a run separates fused experts even if they stay float.
        """
        return False

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form of the fields.

        The ``metadata`` of a field can contain marks. A field with ``{"legacy": True}`` is not part of the
        JSON form. A field with ``{"own": True}`` does not exist in AMD Quark's class. Such a field is part of
        the JSON form only if its value is not the default, so that AMD Quark can read other files. A field
        with ``{"unused": True}`` is part of the JSON form, but is not listed as an option of the algorithm.
        """

        def is_written(attribute: Any, value: Any) -> bool:
            marks = attribute.metadata
            return not marks.get("legacy") and not (marks.get("own") and value == attribute.default)

        return attrs.asdict(self, filter=is_written)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> AlgoConfig:
        """Create settings from their JSON form. Raise TypeError if a key is not the name of a field."""
        return cls(**data)


@with_dataclass_view
@attrs.define(kw_only=True)
class StoredAlgoConfig(AlgoConfig):
    """Settings of an algorithm in the form in which a checkpoint stores them.

    The algorithm need not be installed. If the algorithm is installed, call
    `quark.config.templates.algorithms.algo_config_from_dict` with the result of ``to_dict``. It returns an
    object of the algorithm's own settings class.

    Attributes:
        settings: All keys and values of the JSON form except the name.
        is_run: Whether the checkpoint says that the algorithm has modules that run as part of the model.
    """

    settings: dict[str, Any] = attrs.field(factory=dict)
    is_run: bool = False

    def runs_with_model(self) -> bool:
        """Return ``is_run``. The result is False for checkpoints that another program wrote."""
        return self.is_run

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form. It equals the JSON form from which this object was created."""
        return {"name": self.name, **self.settings}

    @classmethod
    def from_dict(cls, data: dict[str, Any], *, is_run: bool = False) -> StoredAlgoConfig:
        """Return an object that stores the JSON form of settings."""
        settings = {key: value for key, value in data.items() if key != "name"}
        return cls(name=str(data.get("name", "")), settings=settings, is_run=is_run)
