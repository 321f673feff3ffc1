"""`export_onnx` writes a module to an ONNX file. The module may be quantized."""

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
"""Suffix of the second file, which stores the tensors of a large model."""

LARGEST = 1 << 30
"""If the tensors of a model have more bytes than this, a second file stores them.

A protobuf file may have 2 GiB; the limit is half of this, to leave room for the graph.
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
    """Write a module to an ONNX file.

    Each quantizer (`quark.models.layers.QuantizerModule`) of the module becomes QuantizeLinear and
    DequantizeLinear nodes, or calls a function of the domain ``quark``. The file stores codes for quantized
    parameters and buffers, and for the weights and biases of quantized layers. If the tensors have more than
    1 GiB in total, they are stored in ``<path>.data``.

    Args:
        module: A module on any device. `torch.export` traces the module and does not change it.
        args: Positional arguments for a call of the module.
        path: Path of the file. The new file replaces an existing file only when it is complete.
        kwargs: Keyword arguments for a call of the module.
        opset: Version of ONNX's standard operator set, 21 or later.
        input_names: Names of the first inputs, in order. Further inputs have the names of the parameters of
            ``forward``.
        output_names: Names of the outputs, in order.
        dynamic_shapes: The input axes whose length may vary, in the form that `torch.export.export` needs.
            With None, all lengths are fixed.
        weight_format: ``"real_quantized"`` stores codes, and ``"fake_quantized"`` stores the rounded values.
        metadata: Metadata properties to write to the file.
        verbose: Whether torch prints the progress of the export.

    Raises:
        ConfigError: (a ValueError) ``opset`` is earlier than 21, or later than the installed onnx package
            supports.
        UnsupportedError: torch cannot trace the module or cannot convert the traced module to ``opset``, or
            ONNX cannot express a quantizer.
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
    if (made := model.opset_imports[""]) != opset:  # torch does not raise an error if it cannot convert; it only logs this
        raise UnsupportedError(
            f"torch can convert this model to opset {made}, but not to opset {opset}. Choose another opset, such as opset={OPSET}"
        )
    ir.passes.common.ClearMetadataAndDocStringPass()(model)  # metadata with the source file and line of each node
    lower(model, quantizers, opset, stores_codes=weight_format == "real_quantized")
    model.metadata_props.update(metadata or {})
    _save(model, Path(path))


@contextmanager
def _tracing(module: nn.Module) -> Iterator[list[torch.export.ExportedProgram]]:
    """Run the ``with`` block inside `quark.base.tracing.tracing`, and hide all warnings.

    Most of these warnings are about torch's own code.

    If the block fails, raise UnsupportedError with the reason. At the end, release the graph to which
    onnxscript still refers.
    """
    try:
        with tracing() as programs, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield programs
    except Exception as error:  # any error can occur, because the code of the module runs
        reason = str(error.__cause__ or error).strip().split("\n")[0]
        raise UnsupportedError(
            f"torch.export cannot trace this {type(module).__name__} ({type(error).__name__}: {reason}). Remove control flow that depends "
            f"on data. Set verbose=True to print where the trace fails"
        ) from error
    finally:
        _forget_graphs()


def _forget_graphs() -> None:
    """Release the memory of the last graph and its tensors.

    The global rewrite rules of onnxscript's optimizer still refer to the graph. This function removes these
    references.
    """
    for rule in getattr(sys.modules.get("onnxscript.rewriter"), "_DEFAULT_REWRITE_RULES", ()):
        matched = vars(rule._matcher)
        matched.update((name, None) for name in ("_graph", "_current_node", "_match") if name in matched)


@contextmanager
def _own_errors() -> Iterator[None]:
    """If computing or writing a tensor fails, raise the original error instead of the error that wraps it.

    The original error is a `QuarkError` or an `OSError`. If no error in the chain of causes is of these
    types, raise the wrapping error.
    """
    try:
        yield
    except Exception as error:
        causes = [error]
        while (cause := causes[-1].__cause__) is not None and isinstance(cause, Exception):
            causes.append(cause)
        raise next((cause for cause in causes if isinstance(cause, QuarkError | OSError)), error) from None


def _save(model: ir.Model, path: Path) -> None:
    """Write the file, and a second file with the tensors if the tensors are larger than `LARGEST`.

    Both files are written under temporary names and renamed when they are complete.
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
