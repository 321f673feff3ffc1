"""Whether a layout can hold a model: asked before any work, and answered with the layouts that can."""

from __future__ import annotations

from torch import nn

from quark.base.log import get_logger
from quark.checkpoint.chosen_exporter import exporter_of
from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.exporter import Exporter, ExportOptions
from quark.errors import UnsupportedError
from quark.models.plan.quant_plan import QuantPlan
from quark.plugins import exporters

__all__ = ["layouts_that_hold", "refuse_unstorable"]


def refuse_unstorable(name: str, exporter: Exporter, content: CheckpointContent, skeleton: nn.Module, options: ExportOptions) -> None:
    """Check that a layout can hold a model.

    Args:
        name: Name of the exporter.
        exporter: The exporter.
        content: The model that is to be written, quantized or still float, with its configuration and its
            plan.
        skeleton: The quantized model, or its quantized skeleton.
        options: Of the export.

    Raises:
        UnsupportedError: It cannot; the message says why, and which installed layouts can.
    """
    try:
        exporter.check(content, skeleton, options)
    except UnsupportedError as error:
        others = layouts_that_hold(content, skeleton, besides=name)
        can = f"Layouts that hold this model: {', '.join(others)}" if others else "No other installed layout holds this model"
        plan = content.plan
        if isinstance(plan, QuantPlan) and plan.kept:
            can += (
                f". {len(plan.kept)} layer(s) stay quantized as they come: if the layout cannot hold those, set "
                "keep_prequantized_layers=False (--no-keep-prequantized), and they are written dequantized"
            )
        raise UnsupportedError(f"{error}. {can}") from error


def layouts_that_hold(content: CheckpointContent, skeleton: nn.Module, *, besides: str = "") -> list[str]:
    """Return the names of the installed layouts that can hold a model, with the options that they have by default.

    Args:
        content: As of `refuse_unstorable`.
        skeleton: Likewise.
        besides: Name of a layout to leave out.
    """
    names = [record.name for record in exporters() if record.exporter is not None and besides not in (record.name, *record.aliases)]
    return [name for name in names if _holds(name, content, skeleton)]


def _holds(name: str, content: CheckpointContent, skeleton: nn.Module) -> bool:
    try:
        exporter_of(name).check(content, skeleton, ExportOptions())
    except Exception as error:  # whatever is wrong with another layout must not hide what is wrong with the one that was asked for
        get_logger(__name__).debug(f"The layout '{name}' does not hold this model: {error}")
        return False
    return True
