"""The Pareto curve of a selection as a picture: a file of its own, drawn as the report draws it."""

from __future__ import annotations

from importlib.resources import files

from quark_workbench.mixed_precision.selection import SelectionResult
from quark_workbench.report.selection_plots import curve_plot
from quark_workbench.report.svg import picture

__all__ = ["curve_svg"]


def curve_svg(result: SelectionResult) -> str:
    """Return the curve as a picture: predicted losses as a line, measured divergences as dots, the choice as a ring.

    The axis of losses is logarithmic; a loss of 0 is not drawn.
    """
    style = (files("quark_workbench.report") / "style.css").read_text(encoding="utf-8")
    return picture(style, *curve_plot(result.to_dict()))
