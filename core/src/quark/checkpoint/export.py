"""Exports by the name of an exporter: its options, layouts that can hold a model, and the export itself.

`export_safetensors` and `ModelExporter` are AMD Quark's public API.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from quark.base.log import get_logger
from quark.base.torch_state import own_torch_state
from quark.checkpoint.atomic_directory import Leftover, building
from quark.checkpoint.content import CheckpointContent, content_of
from quark.checkpoint.destination import OF_THE_RUN, refuse_used_directory, writes_checkpoint
from quark.checkpoint.exporter import Exporter, ExportOptions, Tokenizer
from quark.checkpoint.inspection import refuse_incomplete_export
from quark.checkpoint.run_file import complete_run_file
from quark.config.export import ExporterConfig, JsonExporterConfig, OnnxExporterConfig
from quark.config.model import QConfig
from quark.errors import CheckpointError, ConfigError, UnknownNameError, UnsupportedError
from quark.models.hf.internals import directory_of
from quark.models.hf.json_files import config_file
from quark.models.hf.tokenizer import load_tokenizer
from quark.models.plan.one_layer import as_model
from quark.models.plan.quant_plan import QuantPlan
from quark.plugins import exporters
from quark.plugins.attribution import attributed, origin
from quark.plugins.options import Option, called, checked, options_of
from quark.plugins.run_events import running

__all__ = [
    "ModelExporter",
    "export_options",
    "export_safetensors",
    "export_with",
    "exporter_of",
    "exporter_options",
    "exporting",
    "layouts_that_hold",
    "refuse_unstorable",
]


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
        raise error.saying(f"{error} {fix}") from None
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


def export_options(name: str, chosen: Mapping[str, Any]) -> ExportOptions:
    """Return the options for an exporter from one mapping of its own and the common options.

    Raises:
        ConfigError: (a ValueError) There is no such option, or a value cannot be used; the message lists the
            options.
    """
    whose, own = f"the exporter '{name}'", {option.name for option in exporters().options(name)}
    values = checked(whose, exporter_options(name), chosen)
    common = {key: value for key, value in values.items() if key not in own}
    JsonExporterConfig(**{key: value for key, value in common.items() if key in ("weight_format", "pack_method")})  # refuses others
    make = functools.partial(ExportOptions, own={key: values[key] for key in values if key in own})
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


@contextmanager
def exporting(
    name: str, out: Path, *, overwrite: bool = False, leftover: Leftover = "refuse", source: Path | None = None
) -> Iterator[Path]:
    """Yield a directory for the exporter of that name, empty or a leftover.

    It is renamed to ``out`` if the body succeeds.

    If the body raises, it is removed, unless it has finished blocks: see
    `quark.checkpoint.atomic_directory.building`.

    Raises:
        OutputError: ``out`` is in use, or cannot be written.
        ResumeError: Finished blocks of an earlier run are in the way.
        PluginError: The exporter has written no file.
    """
    with building(out, name, overwrite=overwrite, leftover=leftover, source=source) as directory:
        yield directory
        if all(path.name in OF_THE_RUN for path in directory.iterdir()):
            raise origin("exporters", name).error(f"has written nothing to '{out}'")


def export_with(name: str, model: nn.Module, output_dir: str | Path, options: ExportOptions | None = None) -> None:
    """Export with the registered exporter of that name.

    Raises:
        UnknownNameError: No exporter has that name.
        OutputError: The directory is in use, or cannot be written.
        ConfigError: The model has not been quantized.
        UnsupportedError: The layout cannot hold the model; the message names those that can. Or the model was
            quantized in FX graph mode, and the exporter writes layers.
        PluginError: The exporter is broken.
        CheckpointError: The settings that the model was loaded with lie outside its checkpoint.
    """
    options = options or ExportOptions()
    exporter = exporter_of(name, options)
    source = directory_of(getattr(model, "config", None))
    if source is not None and (source / "config.json").is_file():
        config_file(source)  # the model has what is in it, whoever has read it
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
        f"the exporter '{name}' writes layers, and this model was quantized in FX graph mode: use the exporter "
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
    """Write a quantized model as a checkpoint in Hugging Face form.

    Models outside transformers need a float model to be read into.

    Args:
        model: The model that `ModelQuantizer.quantize_model` returned.
        output_dir: A directory that does not exist, is empty, or contains only a tokenizer, a processor or
            files of exporters that write no checkpoint, such as GGUF; these stay.
        custom_mode: Name of an exporter; ``"quark"`` is the Quark layout.
        weight_format: ``"real_quantized"`` or None stores codes; ``"fake_quantized"`` stores the rounded
            values, which `import_model_from_safetensors` and transformers load to the same model. Other
            runtimes ignore that setting, and a warning is logged.
        pack_method: ``"reorder"`` or ``"order"``.
        overwrite: Replace an earlier export in ``output_dir`` when the new one is complete. No other file is
            deleted.

    Raises:
        ConfigError, UnknownNameError: (ValueErrors) An argument is out of its range.
        OutputError: The directory is in use, or cannot be written.
    """
    config = JsonExporterConfig(weight_format=weight_format or "real_quantized", pack_method=pack_method)
    options = ExportOptions(weight_format=config.weight_format, pack_method=config.pack_method, overwrite=overwrite)
    export_with(custom_mode, model, output_dir, options)


class ModelExporter:
    """AMD Quark's exporter class of older releases.

    Args:
        config: The export configuration; a path here is used as ``export_dir``.
        export_dir: The output directory, which is created if it does not exist.
    """

    def __init__(self, config: ExporterConfig | str | Path | None = None, export_dir: str | Path | None = None) -> None:
        if isinstance(config, str | Path):
            config, export_dir = None, config
        self.config = config or ExporterConfig()
        self.export_dir = Path(tempfile.gettempdir() if export_dir is None else export_dir)

    def export_safetensors_model(
        self,
        model: nn.Module,
        quant_config: QConfig | None = None,
        custom_mode: str = "quark",
        tokenizer: Tokenizer | None = None,
        overwrite: bool = False,
        **kwargs: Any,
    ) -> None:
        """Write a checkpoint in Hugging Face form, with its tokenizer where one is given.

        Args:
            model: A quantized model.
            quant_config: Part of AMD Quark's public API; without effect, since the model has its
                configuration.
            custom_mode: Name of an exporter.
            tokenizer: Saved beside the weights.
            overwrite: As for `export_safetensors`.
            kwargs: Arguments of older releases of AMD Quark; without effect.
        """
        json_config = self.config.json_export_config
        if json_config.weight_merge_groups:
            get_logger(__name__).warning(
                "weight_merge_groups is without effect: to give one scale to weights that are quantized already, an export would have to "
                "round them again. Set shared_scale_groups in the QConfig (--share-fused-scales), so that they are rounded to one from "
                "the start."
            )
        options = ExportOptions(
            weight_format=json_config.weight_format,
            pack_method=json_config.pack_method,
            kv_cache_group=tuple(json_config.kv_cache_group),
            min_kv_scale=json_config.min_kv_scale,
            overwrite=overwrite,
            tokenizer=tokenizer,
        )
        export_with(custom_mode, model, self.export_dir, options)

    export_quark_model = export_safetensors_model

    def export_onnx_model(
        self,
        model: nn.Module,
        input_args: Any = None,
        input_names: Iterable[str] = (),
        output_names: Iterable[str] = (),
        verbose: bool = False,
        opset_version: int | None = None,
        do_constant_folding: bool = True,
        operator_export_type: Any = None,
        uint4_int4_flag: bool = False,
    ) -> None:
        """Write an ONNX file with the exporter that is registered as ``onnx``.

        Args:
            model: A quantized model.
            input_args: Example inputs: a tensor, a tuple of arguments or a mapping of named ones. None is
                token ids, for transformers models.
            input_names: Names of the inputs, in order; empty takes those of the configuration, or of the
                model's forward.
            output_names: Names of the outputs, likewise.
            verbose: Whether torch prints what it does.
            opset_version: Version of ONNX's operators; None takes that of the configuration, or the
                exporter's own.
            do_constant_folding: Part of AMD Quark's public API; without effect: constants are always folded.
            operator_export_type: Likewise: operators are ONNX's own, and functions made of them.
            uint4_int4_flag: Likewise: codes of 4 bits are always stored in 4 bits.

        Raises:
            UnknownNameError: No installed plugin registers one.
            UnsupportedError: The model cannot be traced, or a quantizer has no form in ONNX.
        """
        configured = self.config.onnx_export_config or OnnxExporterConfig()
        own = {
            "input_names": tuple(input_names) or tuple(configured.input_names),
            "output_names": tuple(output_names) or tuple(configured.output_names),
            "verbose": verbose or configured.verbose,
            "opset": opset_version or configured.opset_version,
        }
        own = {name: value for name, value in own.items() if value}
        weight_format = self.config.json_export_config.weight_format
        export_with("onnx", model, self.export_dir, ExportOptions(own=own, input_args=input_args, weight_format=weight_format))

    def export_gguf_model(self, model: nn.Module, tokenizer_path: str | Path | None, model_type: str) -> None:
        """Write a GGUF file with the exporter that is registered as ``gguf``.

        It is ``<model_type>.gguf``, without a type ``model.gguf``.

        Args:
            model: A quantized model.
            tokenizer_path: Directory of the tokenizer, or a file in it; None takes the one beside the float
                checkpoint.
            model_type: The model's ``config.model_type``, or empty.

        Raises:
            UnknownNameError: No installed plugin registers one.
            ConfigError: The model is of another type.
            CheckpointError: There is no tokenizer, or it is damaged.
        """
        config: Any = getattr(model, "config", None)
        if model_type and model_type != getattr(config, "model_type", model_type):
            raise ConfigError(f"model_type='{model_type}', and this model's config says '{config.model_type}': give that, or ''")
        tokenizer = None
        if tokenizer_path is not None:
            path = Path(tokenizer_path)
            tokenizer = load_tokenizer(path.parent if path.is_file() else path)
            if tokenizer is None:
                raise CheckpointError(f"there is no tokenizer at '{path}': give the directory that has its tokenizer.json")
        own = {"file_name": f"{model_type}.gguf"} if model_type else {}
        export_with("gguf", model, self.export_dir, ExportOptions(tokenizer=tokenizer, own=own))
