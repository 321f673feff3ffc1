"""The documented ways to export: a function, and the class of older releases. Which exporter does it is a name in the registry."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from quark.errors import ConfigError, UnknownNameError
from quark.export.place import building, refuse_used_directory
from quark.export.protocol import Exporter, ExportOptions, Tokenizer
from quark.plugins import exporters
from quark.plugins.attribution import attributed, origin
from quark.specs.export import ExporterConfig, JsonExporterConfig
from quark.specs.model import QConfig


def exporter_of(name: str) -> Exporter:
    """The registered exporter of that name.

    Raises:
        UnknownNameError: There is none.
        PluginError: What is registered cannot be made, or has no method ``export``.
    """
    try:
        made_by = exporters().load(name, "exporter")
    except UnknownNameError as error:
        cure = f"Exporters come with plugins: install a distribution that registers '{name}' in its hook quark_register_exporters"
        raise UnknownNameError(f"{error} {cure}", kind=error.kind, name=error.name, known=error.known) from None
    whose = origin("exporters", name)
    with attributed("being made", whose):
        made: Exporter = made_by()
    if not callable(getattr(made, "export", None)):
        raise whose.error("has no method 'export'")
    return made


@contextmanager
def exporting(name: str, out: Path) -> Iterator[Path]:
    """An empty directory for the exporter of that name, moved to ``out`` when the body ends well; nothing is left where it does not.

    Raises:
        OutputError: ``out`` is in use, or cannot be written.
        PluginError: Nothing was written.
    """
    with building(out) as directory:
        yield directory
        if not any(directory.iterdir()):
            raise origin("exporters", name).error(f"has written nothing to '{out}'")


def export_with(name: str, model: nn.Module, output_dir: str | Path, options: ExportOptions | None = None) -> None:
    """Export with the registered exporter of that name.

    Raises:
        UnknownNameError: There is none.
        OutputError: The directory is in use, or cannot be written.
        ConfigError: The model has not been quantized.
        PluginError: The exporter is broken.
    """
    exporter = exporter_of(name)
    refuse_used_directory(Path(output_dir))
    if not getattr(model, "quark_quantized", False):
        raise ConfigError("this model has not been quantized: give ModelQuantizer(config).quantize_model(model) what it needs, then export")
    with exporting(name, Path(output_dir)) as directory, attributed(f"writing '{output_dir}'", origin("exporters", name)):
        exporter.export(model, directory, options or ExportOptions())


def export_safetensors(
    model: nn.Module, output_dir: str | Path, custom_mode: str = "quark", weight_format: str | None = None, pack_method: str = "reorder"
) -> None:
    """Write a quantized transformers model as a checkpoint in Hugging Face form.

    Args:
        model: What `ModelQuantizer.quantize_model` returned.
        output_dir: Does not exist, or is empty.
        custom_mode: Name of an exporter; ``"quark"`` is the Quark layout.
        weight_format: ``"real_quantized"`` (None too) or ``"fake_quantized"``.
        pack_method: ``"reorder"`` or ``"order"``.

    Raises:
        ConfigError, UnknownNameError: (ValueErrors) An argument is out of its range.
        OutputError: The directory is in use, or cannot be written.
    """
    checked = JsonExporterConfig(weight_format=weight_format or "real_quantized", pack_method=pack_method)
    export_with(custom_mode, model, output_dir, ExportOptions(weight_format=checked.weight_format, pack_method=checked.pack_method))


class ModelExporter:
    """The documented exporter class of older releases.

    Args:
        config: What to write and how; a path in its place is taken as ``export_dir``.
        export_dir: Where to; created where it does not exist.
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
        **kwargs: Any,
    ) -> None:
        """Write a checkpoint in Hugging Face form, with its tokenizer where one is given.

        Args:
            model: A quantized model.
            quant_config: Documented; the model knows its own.
            custom_mode: Name of an exporter.
            tokenizer: Saved beside the weights.
            kwargs: Documented for older releases; none has an effect.
        """
        json_config = self.config.json_export_config
        options = ExportOptions(
            weight_format=json_config.weight_format,
            pack_method=json_config.pack_method,
            kv_cache_group=tuple(json_config.kv_cache_group),
            min_kv_scale=json_config.min_kv_scale,
            tokenizer=tokenizer,
        )
        export_with(custom_mode, model, self.export_dir, options)

    export_quark_model = export_safetensors_model

    def export_onnx_model(
        self, model: nn.Module, input_args: Any, input_names: Iterable[str] = (), output_names: Iterable[str] = ()
    ) -> None:
        """Write an ONNX file, with the exporter that some plugin registers as ``onnx``.

        Raises:
            UnknownNameError: No installed plugin does.
        """
        export_with("onnx", model, self.export_dir)

    def export_gguf_model(self, model: nn.Module, tokenizer_path: str, model_type: str) -> None:
        """Write a GGUF file, with the exporter that some plugin registers as ``gguf``.

        Raises:
            UnknownNameError: No installed plugin does.
        """
        export_with("gguf", model, self.export_dir)
