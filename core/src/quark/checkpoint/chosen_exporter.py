"""The exporter that is asked for by name, its options, and the layouts that can hold a model."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn

from quark.base.log import get_logger
from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.exporter import Exporter, ExportOptions, Tokenizer
from quark.config.export import JsonExporterConfig
from quark.errors import UnknownNameError, UnsupportedError
from quark.models.plan.quant_plan import QuantPlan
from quark.plugins import exporters
from quark.plugins.attribution import attributed, origin
from quark.plugins.options import Option, called, checked, options_of

__all__ = ["export_options", "exporter_of", "exporter_options", "layouts_that_hold", "refuse_unstorable"]


def exporter_of(name: str, options: ExportOptions | None = None) -> Exporter:
    """Return the registered exporter of that name, created with its own options.

    Raises:
        UnknownNameError: No exporter has that name.
        ConfigError: (a ValueError) The exporter has no such option, or refuses its value.
        PluginError: The registered class cannot be called, or does not derive from `Exporter`.
    """
    own = {} if options is None else options.own
    try:
        kind = exporters().load_exporter(name)
    except UnknownNameError as error:
        fix = f"Exporters come with plugins: install a distribution that registers '{name}' in its hook quark_register_exporters"
        raise UnknownNameError(f"{error} {fix}", kind=error.kind, name=error.name, known=error.known) from None
    whose = origin("exporters", name)
    with attributed("being made", whose):
        exporter: Exporter = called(str(whose), kind, checked(f"the exporter '{name}'", exporters().options(name), own)) if own else kind()
    if not isinstance(exporter, Exporter):
        raise whose.error("does not derive from quark.checkpoint.Exporter, and so cannot say whether it streams, nor check a model")
    return exporter


def exporter_options(name: str) -> tuple[Option, ...]:
    """Return the options of an export.

    Options of the exporter come first, then the fields of `ExportOptions`, which all exporters have.
    """
    own = exporters().options(name)
    return (*own, *options_of(ExportOptions, without=("own", "tokenizer", "input_args", *(option.name for option in own))))


def export_options(name: str, chosen: Mapping[str, Any], tokenizer: Tokenizer | None = None) -> ExportOptions:
    """Return the options for an exporter from one mapping of its own and the common options.

    Raises:
        ConfigError: (a ValueError) There is no such option, or a value cannot be used; the message lists the
            options.
    """
    whose, own = f"the exporter '{name}'", {option.name for option in exporters().options(name)}
    values = checked(whose, exporter_options(name), chosen)
    common = {key: value for key, value in values.items() if key not in own}
    JsonExporterConfig(**{key: value for key, value in common.items() if key in ("weight_format", "pack_method")})  # refuses others
    make = functools.partial(ExportOptions, own={key: values[key] for key in values if key in own}, tokenizer=tokenizer)
    options: ExportOptions = called(whose, make, common)
    exporter_of(name, options)  # the exporter refuses a bad value here, before any work
    return options


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
    """Return the names of the installed layouts that can hold a model, with their default options.

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
