"""`export_onnx`: one ONNX file of a module, quantized or not."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common
import torch
from torch import nn

from quark.base.tracing import tracing
from quark.errors import QuarkError, UnsupportedError
from quark_exporters.onnx_layout.exporter import OPSET, refuse_later_opset, refuse_opset
from quark_exporters.onnx_layout.lowering import lower
from quark_exporters.onnx_layout.traced import traced_form

__all__ = ["DATA_SUFFIX", "LARGEST", "export_onnx"]

DATA_SUFFIX = ".data"
"""Suffix of the file with external tensors."""

LARGEST = 1 << 30
"""Models with more bytes store their tensors in a second file; protobuf's limit is 2 GiB, and half of it
leaves room.
"""


def export_onnx(
    module: nn.Module,
    args: tuple[Any, ...],
    path: str | Path,
    *,
    kwargs: Mapping[str, Any] | None = None,
    opset: int = OPSET,
    input_names: Sequence[str] = (),
    output_names: Sequence[str] = (),
    dynamic_shapes: Any = None,
    weight_format: str = "real_quantized",
    metadata: Mapping[str, str] | None = None,
    verbose: bool = False,
) -> None:
    """Write an ONNX file of a module.

    Its quantizers become QuantizeLinear and DequantizeLinear, or functions of the domain ``quark``.

    A quantizer is any `quark.models.layers.QuantizerModule`. Quantized parameters and buffers, and weights
    and biases of quantized layers, are stored as codes. Tensors of more than 1 GiB go into ``<path>.data``.

    Args:
        module: A module on any device; `torch.export` traces it, and it does not change.
        args: Arguments of a forward.
        path: The file. An existing file is replaced once the new file is complete.
        kwargs: Further arguments of a forward, by name.
        opset: Version of ONNX's operators, 21 or later.
        input_names: Names of the inputs, in order; others keep the forward's names.
        output_names: Names of the outputs, in order.
        dynamic_shapes: Which axes of the inputs may vary, as for `torch.export.export`; None fixes them all.
        weight_format: ``"real_quantized"`` stores codes, ``"fake_quantized"`` the rounded values.
        metadata: Properties of the file.
        verbose: Whether torch prints its progress.

    Raises:
        ConfigError: (a ValueError) The opset is out of range.
        UnsupportedError: torch cannot trace the module or convert it to the opset; or ONNX cannot express a
            quantizer.
    """
    refuse_opset(opset)
    refuse_later_opset(opset)
    with _tracing(module) as programs, traced_form(module) as quantizers, torch.no_grad():
        program: Any = torch.onnx.export(
            module,
            args,
            kwargs=dict(kwargs or {}),
            dynamo=True,
            opset_version=opset,
            input_names=input_names or None,
            output_names=output_names or None,
            dynamic_shapes=dynamic_shapes,
            verbose=verbose,
        )
        programs.append(program.exported_program)
    model = program.model
    if (made := model.opset_imports[""]) != opset:  # torch only logs the failure
        raise UnsupportedError(f"torch converts this model to opset {made}, not to {opset}: choose another, such as opset={OPSET}")
    ir.passes.common.ClearMetadataAndDocStringPass()(model)  # where in which file of this machine each node was traced
    lower(model, quantizers, opset, stores_codes=weight_format == "real_quantized")
    model.metadata_props.update(metadata or {})
    _save(model, Path(path))


@contextmanager
def _tracing(module: nn.Module) -> Iterator[list[torch.export.ExportedProgram]]:
    """As `quark.base.tracing.tracing`; hide torch's warnings about its own code, and let onnxscript keep no
    graph. Raise UnsupportedError with the reason of a failure."""
    try:
        with tracing() as programs, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield programs
    except Exception as error:  # of many kinds: the module's own code runs
        reason = str(error.__cause__ or error).strip().split("\n")[0]
        raise UnsupportedError(
            f"torch.export cannot trace this {type(module).__name__} ({type(error).__name__}: {reason}): remove control flow that depends "
            f"on data. verbose=True prints where it fails"
        ) from error
    finally:
        _forget_graphs()


def _forget_graphs() -> None:
    """Drop the last graph, with its tensors, from the rules of onnxscript's optimizer, which are global."""
    for rule in getattr(sys.modules.get("onnxscript.rewriter"), "_DEFAULT_REWRITE_RULES", ()):
        matched = vars(rule._matcher)
        matched.update((name, None) for name in ("_graph", "_current_node", "_match") if name in matched)


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise the error that stopped the computation or writing of a tensor, without wrapping errors.

    It is an error of this project or of the system.
    """
    try:
        yield
    except Exception as error:
        causes = [error]
        while (cause := causes[-1].__cause__) is not None and isinstance(cause, Exception):
            causes.append(cause)
        raise next((cause for cause in causes if isinstance(cause, QuarkError | OSError)), error) from None


def _save(model: ir.Model, path: Path) -> None:
    """Write the file, and a second file for large tensors.

    Both get their names once complete.
    """
    size = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    with TemporaryDirectory(dir=path.parent, prefix=".onnx-") as directory:
        unfinished = Path(directory) / path.name
        data = path.name + DATA_SUFFIX if size > LARGEST else None
        with _own_errors():
            ir.save(model, unfinished, external_data=data)
        if data is not None:
            os.replace(Path(directory) / data, path.parent / data)
        os.replace(unfinished, path)
