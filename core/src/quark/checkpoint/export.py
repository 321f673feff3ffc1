"""Functions that export a model with the exporter of a given name, and check whether this is possible."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from quark.base.log import get_logger
from quark.base.names import folded
from quark.base.torch_state import own_torch_state
from quark.checkpoint.atomic_directory import Leftover, building
from quark.checkpoint.content import CheckpointContent, content_of
from quark.checkpoint.destination import OF_THE_RUN, refuse_used_directory, writes_checkpoint
from quark.checkpoint.exporter import Exporter, ExportOptions
from quark.checkpoint.inspection import refuse_incomplete_export
from quark.checkpoint.run_file import complete_run_file
from quark.errors import UnknownNameError, UnsupportedError
from quark.models.hf.internals import directory_of
from quark.models.hf.json_files import config_file
from quark.models.layers import Branch
from quark.models.plan.one_layer import as_model
from quark.models.plan.quant_plan import QuantPlan
from quark.plugins import exporters
from quark.plugins.attribution import attributed, origin
from quark.plugins.options import Option, called, checked, options_of
from quark.plugins.run_events import running


def exporter_of(name: str, options: ExportOptions | None = None) -> Exporter:
    """Return the registered exporter with the name ``name``. It is created with the options ``options.own``.

    Raises:
        UnknownNameError: No exporter has the name ``name``.
        ConfigError: (a ValueError) The exporter has no such option, or refuses the value of an option.
        PluginError: The registered class cannot be called, or does not derive from `Exporter`.
    """
    own = {} if options is None else options.own
    try:
        kind = exporters().load_exporter(name)
    except UnknownNameError as error:
        fix = f"Plugins provide exporters. Install a distribution that registers '{name}' in its hook quark_register_exporters"
        raise error.saying(f"{error} {fix}") from None
    whose = origin("exporters", name)
    with attributed("being made", whose):
        exporter: Exporter = called(str(whose), kind, checked(f"the exporter '{name}'", exporters().options(name), own)) if own else kind()
    if not isinstance(exporter, Exporter):
        raise whose.error("does not derive from quark.checkpoint.Exporter: derive its class from quark.checkpoint.Exporter")
    return exporter


def exporter_options(name: str) -> tuple[Option, ...]:
    """Return all options that an export with the exporter ``name`` accepts.

    The first items are the options of the exporter itself. The other items are the fields of `ExportOptions`,
    which apply to all exporters.
    """
    own = exporters().options(name)
    return (*own, *options_of(ExportOptions, without=("own", "tokenizer", "input_args", *(option.name for option in own))))


def export_options(name: str, chosen: Mapping[str, Any]) -> ExportOptions:
    """Return the `ExportOptions` for the exporter ``name``.

    ``chosen`` may contain both options of the exporter itself and fields of `ExportOptions`.

    Raises:
        ConfigError: (a ValueError) An option does not exist, or its value cannot be used. The message lists
            the options.
    """
    whose, own = f"the exporter '{name}'", {option.name for option in exporters().options(name)}
    values = checked(whose, exporter_options(name), chosen)
    common = {key: value for key, value in values.items() if key not in own}
    make = functools.partial(ExportOptions, own={key: values[key] for key in values if key in own})
    options: ExportOptions = called(whose, make, common)
    exporter_of(name, options)  # the exporter refuses a bad value now, before any work
    return options


def refuse_unstorable(name: str, exporter: Exporter, content: CheckpointContent, skeleton: nn.Module, options: ExportOptions) -> None:
    """Check that a layout can represent a model.

    Args:
        name: Name of the exporter.
        exporter: The exporter.
        content: The model to write, quantized or still float, with its configuration and its plan.
        skeleton: The quantized model, or a copy of it with all tensors on the meta device.
        options: Options of the export.

    Raises:
        UnsupportedError: The layout cannot represent the model. The message says why, and names installed
            layouts that can represent it.
    """
    try:
        _check(name, exporter, content, skeleton, options)
    except UnsupportedError as error:
        others = layouts_that_hold(content, skeleton, besides=name)
        can = f"Layouts that hold this model: {', '.join(others)}" if others else "No other installed layout holds this model"
        plan = content.plan
        if isinstance(plan, QuantPlan) and plan.kept:
            can += (
                f". {len(plan.kept)} layer(s) keep the quantization of the source: if the layout cannot hold these layers, set "
                "keep_prequantized_layers=False (--no-keep-prequantized) to write them dequantized"
            )
        raise UnsupportedError(f"{error}. {can}") from error


def layouts_that_hold(content: CheckpointContent, skeleton: nn.Module, *, besides: str = "") -> list[str]:
    """Return the names of the installed layouts that can represent a model with default options.

    Args:
        content: The model to write, quantized or still float, with its configuration and its plan.
        skeleton: The quantized model, or a copy of it with all tensors on the meta device.
        besides: Name of a layout to leave out of the result.
    """
    names = [record.name for record in exporters() if record.exporter is not None and besides not in (record.name, *record.aliases)]
    return [name for name in names if _holds(name, content, skeleton)]


def _holds(name: str, content: CheckpointContent, skeleton: nn.Module) -> bool:
    """Return whether the layout ``name`` can represent a model with default options."""
    try:
        _check(name, exporter_of(name), content, skeleton, ExportOptions())
    except Exception as error:  # an error of another layout must not hide the error of the requested one
        get_logger(__name__).debug(f"The layout '{name}' cannot hold this model: {error}")
        return False
    return True


def _check(name: str, exporter: Exporter, content: CheckpointContent, skeleton: nn.Module, options: ExportOptions) -> None:
    """Raise UnsupportedError if an exporter cannot write a model, for example because it has branches."""
    exporter.check(content, skeleton, options)
    branched = [] if exporter.holds_branches else [n.rpartition(".")[0] for n, m in skeleton.named_modules() if isinstance(m, Branch)]
    if branched:
        raise UnsupportedError(
            f"the layout '{name}' has no place for branches beside layers, but {len(branched)} layer(s) have a branch ({folded(branched)})."
            " Choose a layout that holds branches, or leave out the algorithm that adds them"
        )


@contextmanager
def exporting(
    name: str, out: Path, *, overwrite: bool = False, leftover: Leftover = "refuse", source: Path | None = None
) -> Iterator[Path]:
    """Yield the temporary directory into which the caller writes an export.

    The directory is empty, or contains finished blocks of an earlier run. If the ``with`` statement succeeds,
    the directory is renamed to ``out``. If the statement raises an error, the directory is removed, except if
    it contains finished blocks (see `quark.checkpoint.atomic_directory.building`).

    Raises:
        OutputError: ``out`` is in use, or cannot be written.
        ResumeError: An earlier run has left finished blocks.
        PluginError: The exporter has written no file.
    """
    with building(out, name, overwrite=overwrite, leftover=leftover, source=source) as directory:
        yield directory
        if all(path.name in OF_THE_RUN for path in directory.iterdir()):
            raise origin("exporters", name).error(f"has written nothing to '{out}'")


def export_with(name: str, model: nn.Module, output_dir: str | Path, options: ExportOptions | None = None) -> None:
    """Export a quantized model with the registered exporter ``name``.

    Raises:
        UnknownNameError: No exporter has the name ``name``.
        OutputError: The directory is in use, or cannot be written.
        ConfigError: The model has not been quantized.
        UnsupportedError: The layout cannot represent the model. The message names layouts that can represent
            it. Or the model was quantized in FX graph mode, but the exporter writes layers.
        PluginError: The code of the exporter has failed.
        CheckpointError: ``config.json`` in the model's float checkpoint is a link to a file outside of the
            checkpoint.
    """
    options = options or ExportOptions()
    exporter = exporter_of(name, options)
    source = directory_of(getattr(model, "config", None))
    if source is not None and (source / "config.json").is_file():
        config_file(source)  # refuses a link, because settings of the loaded model would come from its target
    refuse_used_directory(Path(output_dir), name, overwrite=options.overwrite, source=source)
    content = content_of(as_model(model))
    _refuse_graph(name, content.plan)
    refuse_unstorable(name, exporter, content, content.model, options)
    with own_torch_state(), running("export", source=type(model).__name__, out=str(output_dir)) as events:
        events.phase("write")
        place = exporting(name, Path(output_dir), overwrite=options.overwrite, source=source)
        with place as directory, attributed(f"writing '{output_dir}'", origin("exporters", name)):
            exporter.export(content, directory, options)
            refuse_incomplete_export(name, directory, content.model)
            if writes_checkpoint(exporters().get(name)):
                complete_run_file(directory)
        events.exported(Path(output_dir), name)


def _refuse_graph(name: str, plan: object) -> None:
    """Raise UnsupportedError if a model was quantized in FX graph mode and the exporter writes layers."""
    if isinstance(plan, QuantPlan) or "graphs" in exporters().get(name).capabilities:
        return
    able = [record.name for record in exporters() if "graphs" in record.capabilities]
    raise UnsupportedError(
        f"the exporter '{name}' writes layers, but this model was quantized in FX graph mode. Use the exporter "
        f"{' or '.join(able) or 'of another plugin'}, or torch.export.export"
    )


def export_safetensors(
    model: nn.Module,
    output_dir: str | Path,
    custom_mode: str = "quark",
    weight_format: str | None = None,
    pack_method: str = "reorder",
    *,
    overwrite: bool = False,
) -> None:
    """Write a quantized model as a Hugging Face checkpoint.

    If the model is not a transformers model, you need a float model of the same class to read the checkpoint.

    Args:
        model: The model that `ModelQuantizer.quantize_model` returned.
        output_dir: The output directory. Either it does not exist yet, or it is empty, or it contains only a
            tokenizer, a processor, or files of exporters that write no checkpoint, such as a GGUF file. These
            files stay.
        custom_mode: Name of an exporter. ``"quark"`` means the Quark layout.
        weight_format: ``"real_quantized"`` or None stores codes. ``"fake_quantized"`` stores rounded values.
            `import_model_from_safetensors` and transformers load the same model from either form. Other
            runtimes ignore the entry of the checkpoint that says which form it has, so a warning is logged
            for ``"fake_quantized"``.
        pack_method: Packing order of 4-bit codes in a word, ``"reorder"`` or ``"order"``.
        overwrite: Whether an earlier export in ``output_dir`` is replaced when the new export is complete. No
            other file is deleted.

    Raises:
        ConfigError, UnknownNameError: (ValueErrors) An argument is not valid.
        OutputError: The directory is in use, or cannot be written.
    """
    options = ExportOptions(weight_format=weight_format or "real_quantized", pack_method=pack_method, overwrite=overwrite)
    export_with(custom_mode, model, output_dir, options)
