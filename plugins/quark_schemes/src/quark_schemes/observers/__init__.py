"""Observers, one file for each family. Here: why an observer cannot serve a spec."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from quark.config.enums import QSchemeType
from quark.config.tensor import QTensorConfig

__all__ = ["granularity_error", "options_error"]


def options_error(observer: str, spec: QTensorConfig, known: Collection[str] = ()) -> str | None:
    """Return why an observer with the options ``known`` cannot use those of the spec, and the fix.

    None if it can.
    """
    unknown = [name for name, _ in spec.observer_options if name not in known]
    if not unknown:
        return None
    fix = f"its options are {', '.join(known)}" if known else "it has none, leave observer_options out"
    return f"{observer} has no option {', '.join(map(repr, unknown))}: {fix}"


def granularity_error(observer: str, spec: QTensorConfig, served: Sequence[QSchemeType]) -> str:
    """Return that an observer does not serve the granularity of the spec, and the fix."""
    asked = spec.qscheme and spec.qscheme.name
    fix = f"leave observer_cls out, and that of {spec.dtype.name} serves it, or name an observer of {asked}"
    return f"{observer} serves {' or '.join(qscheme.name for qscheme in served)}, not {asked}: {fix}"
