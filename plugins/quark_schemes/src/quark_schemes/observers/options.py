"""Which options of a spec an observer has."""

from __future__ import annotations

from collections.abc import Collection

from quark.config.tensor import QTensorConfig

__all__ = ["options_error"]


def options_error(observer: str, spec: QTensorConfig, known: Collection[str] = ()) -> str | None:
    """Return why an observer with the options ``known`` cannot use those of the spec, and the fix; None if it can."""
    unknown = [name for name, _ in spec.observer_options if name not in known]
    if not unknown:
        return None
    fix = f"its options are {', '.join(known)}" if known else "it has none, leave observer_options out"
    return f"{observer} has no option {', '.join(map(repr, unknown))}: {fix}"
