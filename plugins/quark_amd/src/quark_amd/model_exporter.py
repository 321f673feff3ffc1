"""The exporter class of older releases of AMD Quark, and AMD Quark's functions that write ONNX and GGUF
files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from quark.base.log import get_logger
from quark.checkpoint.export import export_with
from quark.checkpoint.exporter import ExportOptions, Tokenizer
from quark.config.model import QConfig
from quark.errors import CheckpointError, ConfigError
from quark.models.hf.tokenizer import load_tokenizer
from quark_amd.export_config import ExporterConfig, OnnxExporterConfig

__all__ = ["ModelExporter", "export_gguf", "export_onnx"]


class ModelExporter:
    """The exporter class of older releases of AMD Quark.

    Args:
        config: The export configuration. If it is a path, it is used as ``export_dir``.
        export_dir: The output directory. It is created if it does not exist.
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
        """Write a checkpoint in Hugging Face's layout. If ``tokenizer`` is given, it is saved, too.

        Args:
            model: A quantized model.
            quant_config: An argument of AMD Quark. It has no effect, because a quantized model stores its
                configuration.
            custom_mode: Name of the exporter that is used.
            tokenizer: Tokenizer to save beside the weights.
            overwrite: As in `export_safetensors`.
            kwargs: Arguments of older releases of AMD Quark. They have no effect.
        """
        json_config = self.config.json_export_config
        if json_config.weight_merge_groups:
            get_logger(__name__).warning(
                "weight_merge_groups has no effect, since an export does not round weights again. Set shared_scale_groups in the QConfig "
                "(--share-fused-scales) before you quantize."
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
            input_args: Example inputs: a tensor, a tuple of arguments, or a mapping of keyword arguments. If
                it is None, the example inputs are token ids, which is possible only for transformers models.
            input_names: Names of the inputs, in order. If it is empty, the names in the export configuration
                are used. If the configuration has no names either, the names of the arguments of the model's
                ``forward`` are used.
            output_names: Names of the outputs, in order. If it is empty, the names in the export
                configuration are used. If the configuration has no names either, the exporter chooses names.
            verbose: Whether torch prints its progress.
            opset_version: Version of the ONNX operators. If it is None, the version in the export
                configuration is used. If the configuration has no version either, the exporter's default is
                used.
            do_constant_folding: It has no effect, because constants are always folded.
            operator_export_type: It has no effect, because the file always uses ONNX operators and functions
                that consist of ONNX operators.
            uint4_int4_flag: It has no effect, because 4-bit codes are always stored in 4 bits.

        Raises:
            UnknownNameError: No installed plugin registers the exporter ``onnx``.
            UnsupportedError: The model cannot be traced, or a quantizer cannot be expressed in ONNX.
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

        The file name is ``<model_type>.gguf``, or ``model.gguf`` if ``model_type`` is empty.

        Args:
            model: A quantized model.
            tokenizer_path: Directory of the tokenizer, or a file in this directory. If it is None, the
                tokenizer of the float checkpoint is used.
            model_type: The model's ``config.model_type``, or an empty string.

        Raises:
            UnknownNameError: No installed plugin registers the exporter ``gguf``.
            ConfigError: The configuration of the model has another type than ``model_type``.
            CheckpointError: The tokenizer is missing or damaged.
        """
        config: Any = getattr(model, "config", None)
        if model_type and model_type != getattr(config, "model_type", model_type):
            raise ConfigError(
                f"model_type='{model_type}', but the model's config says '{config.model_type}'. Give this type, or an empty string"
            )
        tokenizer = None
        if tokenizer_path is not None:
            path = Path(tokenizer_path)
            tokenizer = load_tokenizer(path.parent if path.is_file() else path)
            if tokenizer is None:
                raise CheckpointError(f"there is no tokenizer at '{path}'. Give the directory that contains the tokenizer.json")
        own = {"file_name": f"{model_type}.gguf"} if model_type else {}
        export_with("gguf", model, self.export_dir, ExportOptions(tokenizer=tokenizer, own=own))


def export_onnx(
    model: nn.Module,
    output_dir: str | Path,
    input_args: Any = None,
    opset_version: int | None = None,
    input_names: Iterable[str] = (),
    output_names: Iterable[str] = (),
    verbose: bool = False,
    do_constant_folding: bool = True,
    operator_export_type: Any = None,
    uint4_int4_flag: bool = False,
    dynamo: bool = True,
) -> None:
    """Write ``quark_model.onnx`` with the exporter that is registered as ``onnx``.

    Args:
        model: A quantized model.
        output_dir: As in `quark.checkpoint.export_safetensors`. A checkpoint in this directory is not
            removed.
        input_args: As in `ModelExporter.export_onnx_model`.
        opset_version: As in `ModelExporter.export_onnx_model`.
        input_names: As in `ModelExporter.export_onnx_model`.
        output_names: As in `ModelExporter.export_onnx_model`.
        verbose: As in `ModelExporter.export_onnx_model`.
        do_constant_folding: It has no effect.
        operator_export_type: It has no effect.
        uint4_int4_flag: It has no effect.
        dynamo: It has no effect, because `torch.export` always traces the model.

    Raises:
        UnknownNameError: No installed plugin registers the exporter ``onnx``.
        UnsupportedError: The model cannot be traced, or a quantizer cannot be expressed in ONNX.
    """
    ModelExporter(export_dir=output_dir).export_onnx_model(model, input_args, input_names, output_names, verbose, opset_version)


def export_gguf(model: nn.Module, output_dir: str | Path, model_type: str = "", tokenizer_path: str | Path | None = None) -> None:
    """Write a GGUF file with the exporter that is registered as ``gguf``.

    Args:
        model: A quantized model.
        output_dir: As in `quark.checkpoint.export_safetensors`. A checkpoint in this directory is not
            removed.
        model_type: As in `ModelExporter.export_gguf_model`.
        tokenizer_path: As in `ModelExporter.export_gguf_model`.

    Raises:
        UnknownNameError: No installed plugin registers the exporter ``gguf``.
    """
    ModelExporter(export_dir=output_dir).export_gguf_model(model, tokenizer_path, model_type)
