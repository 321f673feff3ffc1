"""Settings of an algorithm with one thing wrong each, made from healthy ones."""

from __future__ import annotations

from typing import Any

import attrs

from quark.config.algorithm import AlgoConfig

__all__ = ["forgetting_all", "having_an_idle_one", "requiring_one", "saying_nothing", "taking_every_key"]


def requiring_one(settings: type[AlgoConfig]) -> type[AlgoConfig]:
    """Return a class that has one more setting, without a default."""
    return attrs.make_class("Required", {"amount": attrs.field()}, bases=(settings,), kw_only=True)


def forgetting_all(settings: type[AlgoConfig]) -> type[AlgoConfig]:
    """Return a class whose JSON has its name alone."""

    class Forgets(settings):  # type: ignore[misc, valid-type]
        def to_dict(self) -> dict[str, Any]:
            return {"name": self.name}

    return Forgets


def taking_every_key(settings: type[AlgoConfig]) -> type[AlgoConfig]:
    """Return a class that ignores keys which are none of its settings."""
    names = {field.name for field in attrs.fields(settings)}

    class TakesAll(settings):  # type: ignore[misc, valid-type]
        @classmethod
        def from_dict(cls, data: dict[str, Any]) -> AlgoConfig:
            return cls(**{key: value for key, value in data.items() if key in names})

    return TakesAll


def having_an_idle_one(settings: type[AlgoConfig]) -> type[AlgoConfig]:
    """Return a class with one more setting, which is described and which no processor reads."""
    idle = attrs.make_class("Idle", {"sweeps": attrs.field(default=2, type=int)}, bases=(settings,), kw_only=True)
    idle.__doc__ = "Settings.\n\nAttributes:\n    sweeps: How often the work is done.\n"
    return idle


def saying_nothing(settings: type[AlgoConfig]) -> type[AlgoConfig]:
    """Return a class with the same settings, without a description of them."""
    own = {field.name: attrs.field(default=field.default) for field in attrs.fields(settings)}
    return attrs.make_class("Undescribed", own, bases=(AlgoConfig,), kw_only=True)
