"""`OnnxExporter` writes a model to one ONNX file, ``quark_model.onnx``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated

import torch
from torch import nn

from quark.base.log import get_logger
from quark.base.names import folded
from quark.checkpoint import CheckpointContent, Exporter, ExportOptions, save_companions
from quark.checkpoint.model_tensors import warn_of_left_out
from quark.config.layer import levels
from quark.errors import ConfigError, MissingPluginError, UnsupportedError
from quark.models.layers import QuantizedLayer
from quark.models.layers.experts import SeparateExperts
from quark.plugins import OptionNote
from quark_exporters.onnx_layout.example_inputs import example_inputs
from quark_exporters.onnx_layout.traced import traced_quantizers
from quark_exporters.stored_codes import short_block_of

__all__ = ["FILE", "OPSET", "OnnxExporter", "refuse_later_opset", "refuse_opset"]

FILE = "quark_model.onnx"
"""Name of the exported file. The tensors of a large model are in a second file, ``quark_model.onnx.data``."""

OPSET = 21
"""The first version of ONNX's operator set (opset) that has 4-bit integers and block scales."""


class OnnxExporter(Exporter):
    """Writes an ONNX file that stores weights as codes and rounds activations.

    The operators QuantizeLinear and DequantizeLinear round activations. If they cannot round to a number
    format, the file defines a function that rounds to it.

    The exporter traces the whole model in memory. It computes the codes while it writes the file, one tensor
    at a time.

    Args:
        opset: Version of ONNX's standard operator set, 21 or later.
        input_names: Names of the inputs, in order. If empty, the inputs have the names of the parameters of
            ``forward``.
        output_names: Names of the outputs, in order. If empty, the output of a transformers model is named
            ``logits``, and torch numbers the outputs of other models.
        verbose: Whether torch prints the progress of the export.
    """

    def __init__(
        self,
        opset: Annotated[int, OptionNote(examples=(22, 23))] = OPSET,
        input_names: Sequence[str] = (),
        output_names: Sequence[str] = (),
        verbose: Annotated[bool, OptionNote(is_cost_only=True)] = False,
    ) -> None:
        refuse_opset(opset)
        self._opset = opset
        self._input_names, self._output_names = tuple(input_names), tuple(output_names)
        self._verbose = verbose

    def check(self, content: CheckpointContent, skeleton: nn.Module, options: ExportOptions) -> None:
        """Raise an error if ONNX cannot express the model (see `quark.checkpoint.Exporter.check`).

        The message of the error lists everything that ONNX cannot express.
        """
        _refuse_missing_packages()
        refuse_later_opset(self._opset)
        example_inputs(content.model, options.input_args)
        if mixtures := [name for name, module in skeleton.named_modules() if isinstance(module, SeparateExperts)]:
            raise UnsupportedError(
                f"the data choose the experts of {folded(mixtures)}, which ONNX cannot express. Export the model as safetensors"
            )
        self._refuse_inexpressible(skeleton)

    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        """Write the ONNX file, as `quark.checkpoint.Exporter.export` describes."""
        self.check(content, content.model, options)
        _warn_of_bfloat16(content.model)
        warn_of_left_out(content, "ONNX")
        from quark_exporters.onnx_layout.export import export_onnx

        save_companions(content.model, out, options.tokenizer)  # before the long trace: if the disk is full, this fails early
        inputs = example_inputs(content.model, options.input_args)
        export_onnx(
            inputs.module,
            inputs.args,
            out / FILE,
            kwargs=inputs.kwargs,
            opset=self._opset,
            input_names=self._input_names or inputs.names,
            output_names=self._output_names or inputs.output_names,
            dynamic_shapes=inputs.dynamic_shapes,
            weight_format=options.weight_format,
            metadata={"quark.quantization_config": json.dumps(content.config.to_dict())},
            verbose=self._verbose,
        )

    def _refuse_inexpressible(self, skeleton: nn.Module) -> None:
        from quark_exporters.onnx_layout.trial import reason_against

        reasons: dict[str, list[str]] = {}
        for name, layer in skeleton.named_modules():
            weight = layer._parameters.get("weight") if isinstance(layer, QuantizedLayer) else None
            if weight is not None and weight.ndim == 2 and (error := short_block_of(layer.layer_config, tuple(weight.shape))) is not None:
                reasons.setdefault(error, []).append(name)
        for traced in traced_quantizers(skeleton):
            reason = reason_against(traced.quantizer, self._opset, activation=not traced.is_rounded)
            if reason is not None:
                formats = " → ".join(level.dtype.name for level in levels(traced.quantizer.spec))
                reasons.setdefault(f"{formats} {reason}", []).append(traced.name)
        if reasons:
            what = "; ".join(f"{reason} ({folded(names)})" for reason, names in reasons.items())
            raise UnsupportedError(f"ONNX cannot express some quantizers of this model: {what}")


def refuse_opset(opset: int) -> None:
    """Raise ConfigError if ``opset`` is too early for quantized models."""
    if opset < OPSET:
        raise ConfigError(f"opset={opset}: earlier opsets than {OPSET} lack 4-bit integers and block scales. Choose opset {OPSET} or later")


def refuse_later_opset(opset: int) -> None:
    """Raise ConfigError if ``opset`` is later than the installed onnx package supports."""
    latest = import_module("onnx.defs").onnx_opset_version()
    if opset > latest:
        raise ConfigError(f"opset={opset}: the installed onnx package has opsets up to {latest}. Choose an opset from {OPSET} to {latest}")


def _warn_of_bfloat16(model: nn.Module) -> None:
    if any(parameter.dtype is torch.bfloat16 for parameter in model.parameters()):
        get_logger(__name__).warning(
            "This model is in bfloat16, and onnxruntime does not compute bfloat16 on CPUs. For a CPU, quantize the model in float32."
        )


def _refuse_missing_packages() -> None:
    try:
        for package in ("onnx", "onnx_ir", "onnxscript"):
            import_module(package)
    except ImportError as error:
        raise MissingPluginError(
            f"The ONNX exporter needs the package {package}. Install it with: pip install 'quark-exporters[onnx]'"
        ) from error
