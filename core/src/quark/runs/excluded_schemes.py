"""Schemes that a rounding cannot round, as its record says: refused when a run is planned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quark.config.layer import levels
from quark.config.tensor import QTensorConfig
from quark.errors import UnsupportedError
from quark.planning.plan_row import PlanRow
from quark.plugins import algorithms, schemes

__all__ = ["refuse_excluded_schemes"]

Kind = tuple[tuple[object, ...], ...]


def refuse_excluded_schemes(rounding: str, rows: Iterable[PlanRow]) -> None:
    """Raise where a rounding would round weights of a scheme that its record excludes.

    A configuration does not say which scheme it comes from: weights are those of a scheme where number formats, granularities, symmetry and
    scale formats of all levels are, whatever the group size.

    Args:
        rounding: Name of the rounding.
        rows: Of the plan.

    Raises:
        UnsupportedError: That is so; the message names the scheme, a layer and the reason.
    """
    record = algorithms().get(rounding)
    excluded = {name: reason for name, reason in record.excluded_schemes.items() if name in schemes()}
    if not excluded:
        return
    kinds = {_kind(schemes().load_config(name)().weight): name for name in excluded}
    for row in rows:
        if row.algorithm is None or row.config is None:
            continue
        name = kinds.get(_kind(row.config.weight))
        if name is not None:
            raise UnsupportedError(
                f"the rounding '{rounding}' cannot round '{row.name}', whose weight is of the scheme '{name}': {excluded[name]}. Choose "
                "another scheme for this layer, or leave the algorithm out"
            )


def _kind(weight: QTensorConfig | Sequence[QTensorConfig] | None) -> Kind:
    """Return what tells the weights of one scheme from those of another."""
    if weight is None:
        return ()
    return tuple((level.dtype, level.qscheme, level.symmetric, level.scale_format, level.is_scale_quant) for level in levels(weight))
