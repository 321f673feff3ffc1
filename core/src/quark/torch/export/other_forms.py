"""Exports in other forms than safetensors by AMD Quark's functions: through the exporters that are registered under their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from quark.checkpoint.export import export_with

__all__ = ["export_gguf", "export_onnx"]


def export_onnx(model: nn.Module, output_dir: str | Path, input_args: Any = None, **options: Any) -> None:
    """Write an ONNX file with the exporter that is registered as ``onnx``.

    Args:
        model: A quantized model.
        output_dir: A directory that does not exist or is empty.
        input_args: Part of AMD Quark's public API; without effect.
        options: As ``input_args``.

    Raises:
        UnknownNameError: No installed plugin registers one.
    """
    export_with("onnx", model, output_dir)


def export_gguf(model: nn.Module, output_dir: str | Path, model_type: str = "", tokenizer_path: str | Path | None = None) -> None:
    """Write a GGUF file with the exporter that is registered as ``gguf``.

    Args:
        model: A quantized model.
        output_dir: A directory that does not exist or is empty.
        model_type: Part of AMD Quark's public API; without effect, since the model has its own.
        tokenizer_path: As ``model_type``.

    Raises:
        UnknownNameError: No installed plugin registers one.
    """
    export_with("gguf", model, output_dir)
