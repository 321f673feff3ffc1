"""Exports in other forms than safetensors by AMD Quark's functions: through the exporters that are registered under their names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from quark.checkpoint.export import ModelExporter

__all__ = ["export_gguf", "export_onnx"]


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
        output_dir: As of `quark.checkpoint.export_safetensors`; a checkpoint that lies there stays.
        input_args: As of `ModelExporter.export_onnx_model`, like all others but the last.
        opset_version: Likewise.
        input_names: Likewise.
        output_names: Likewise.
        verbose: Likewise.
        do_constant_folding: Part of AMD Quark's public API; without effect.
        operator_export_type: Likewise.
        uint4_int4_flag: Likewise.
        dynamo: Likewise: models are always traced by `torch.export`.

    Raises:
        UnknownNameError: No installed plugin registers one.
        UnsupportedError: The model cannot be traced, or a quantizer has no form in ONNX.
    """
    exporter = ModelExporter(export_dir=output_dir)
    exporter.export_onnx_model(model, input_args, input_names, output_names, verbose, opset_version)


def export_gguf(model: nn.Module, output_dir: str | Path, model_type: str = "", tokenizer_path: str | Path | None = None) -> None:
    """Write a GGUF file with the exporter that is registered as ``gguf``.

    Args:
        model: A quantized model.
        output_dir: As of `quark.checkpoint.export_safetensors`; a checkpoint that lies there stays.
        model_type: As of `ModelExporter.export_gguf_model`.
        tokenizer_path: Likewise; None takes the tokenizer beside the float checkpoint.

    Raises:
        UnknownNameError: No installed plugin registers one.
    """
    ModelExporter(export_dir=output_dir).export_gguf_model(model, tokenizer_path, model_type)
