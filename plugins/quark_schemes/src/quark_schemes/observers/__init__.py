"""Observers, one file for each family. Here: their base, which refuses specs that a class does not serve."""

from __future__ import annotations

from typing import ClassVar

from quark.config.enums import QSchemeType
from quark.config.tensor import QTensorConfig
from quark.errors import CalibrationError
from quark.numbers import Observer

__all__ = ["ServingObserver"]


class ServingObserver(Observer):
    """Base of the observers here.

    Attributes:
        qschemes: The granularities that a class serves; empty for all.
    """

    qschemes: ClassVar[tuple[QSchemeType, ...]] = ()

    @classmethod
    def spec_error(cls, spec: QTensorConfig) -> str | None:
        if cls.qschemes and spec.qscheme not in cls.qschemes:
            asked = spec.qscheme and spec.qscheme.name
            fix = f"leave observer_cls out, and that of {spec.dtype.name} serves it, or name an observer of {asked}"
            return f"{cls.__name__} serves {' or '.join(qscheme.name for qscheme in cls.qschemes)}, not {asked}: {fix}"
        unknown = [name for name, _ in spec.observer_options if name not in cls.options]
        if not unknown:
            return None
        fix = f"its options are {', '.join(cls.options)}" if cls.options else "it has none, leave observer_options out"
        return f"{cls.__name__} has no option {', '.join(map(repr, unknown))}: {fix}"

    @staticmethod
    def nothing_observed() -> CalibrationError:
        """Return the error of a range that is asked for before any data."""
        return CalibrationError("nothing was observed, so there is no range: run calibration data through the layer")
