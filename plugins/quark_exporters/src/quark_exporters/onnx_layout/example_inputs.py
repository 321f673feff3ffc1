"""Example inputs for tracing a model, and the input axes whose length may vary."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, fx, nn

from quark.errors import UnsupportedError

__all__ = ["ExampleInputs", "example_inputs"]

_TOKENS = (2, 8)
"""Shape of the example token ids: sequences, tokens.

No axis has length 1, because torch.export fixes such an axis.
"""

_BATCH, _SEQUENCE = torch.export.Dim("batch"), torch.export.Dim("sequence")


@attrs.frozen(eq=False)
class ExampleInputs:
    """Arguments for tracing a model.

    Attributes:
        module: The module to trace. For a transformers model, it is a wrapper that returns only the logits.
            Otherwise, it is the model.
        args, kwargs: The positional and the keyword arguments with which ``module`` is called.
        names: Names of the inputs in the file. If empty, the inputs have the names of the parameters of
            ``forward``.
        output_names: Names of the outputs in the file. If empty, torch chooses the names.
        dynamic_shapes: The input axes whose length may vary, in the form that `torch.export.export` needs.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()
    dynamic_shapes: Any = None


def example_inputs(model: Any, given: Any = None) -> ExampleInputs:
    """Return the arguments for tracing a model.

    For a transformers model, the batch size and the sequence length may vary, and the traced graph has no KV
    cache. For a graph module, the same axes may vary as in its graph. For other models, all shapes are fixed.

    Args:
        model: The model.
        given: The inputs: a tensor, a tuple of positional arguments, or a mapping of named arguments. With
            None, the function makes token ids, which only transformers models accept.

    Raises:
        UnsupportedError: The model is not from transformers, and ``given`` is None.
    """
    args, kwargs = _split(given)
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        if not args and not kwargs:
            raise UnsupportedError(
                f"this {type(model).__name__} has no default example inputs, because it is not a transformers model. Set input_args "
                f"in the call of export_onnx or ModelExporter.export_onnx_model"
            )
        return ExampleInputs(model, args, kwargs, dynamic_shapes=_axes_of_graph(model, args, kwargs))
    if not args and not kwargs:
        args = (torch.zeros(_TOKENS, dtype=torch.int64),)
    parameters = list(inspect.signature(model.forward).parameters)
    names = (*parameters[: len(args)], *kwargs)
    arguments = [_varying(value) for value in (*args, *kwargs.values())]
    fixed = {"use_cache": False} if "use_cache" in parameters else {}
    module = _Logits(model, names, fixed).train(model.training)
    return ExampleInputs(module, tuple(arguments), {}, names, ("logits",), {"inputs": tuple(map(_axes_of, arguments))})


def _axes_of_graph(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the axes whose length may vary, for each input of a graph module.

    Return None if all shapes are fixed, or if the inputs are not positional arguments with one tensor each.
    """
    if not isinstance(model, fx.GraphModule):
        return None
    shapes = [getattr(node.meta.get("val"), "shape", ()) for node in model.graph.nodes if node.op == "placeholder"]
    axes = [{axis: torch.export.Dim.AUTO for axis, size in enumerate(shape) if isinstance(size, torch.SymInt)} for shape in shapes]
    if len(axes) != len(args) + len(kwargs) or not any(axes) or kwargs:
        return None
    return tuple(axes)


class _Logits(nn.Module):
    """Runs a transformers model and returns its logits, or its first output if the model has no logits."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], fixed: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self._names = names
        self._fixed = fixed

    def forward(self, *inputs: Any) -> Any:
        output = self.model(**dict(zip(self._names, inputs, strict=True)), **self._fixed)
        return output.logits if hasattr(output, "logits") else output[0]


def _split(given: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if given is None:
        return (), {}
    if isinstance(given, Mapping):
        return (), dict(given)
    return (given if isinstance(given, tuple) else tuple(given) if isinstance(given, list) else (given,)), {}


def _varying(value: Any) -> Any:
    """Return ``value``, in which each axis that may vary has at least length 2.

    If such an axis has length 1, the entry is repeated.
    """
    for axis in _axes_of(value) or {}:
        if value.shape[axis] == 1:
            value = value.repeat_interleave(2, axis)
    return value


def _axes_of(value: Any) -> dict[int, Any] | None:
    """Return the axes of an input whose length may vary, as a dictionary from axis to torch dimension.

    Both axes of a matrix, such as token ids ``[batch, sequence]``, may vary. In other tensors, only the first
    axis may vary. Return None if ``value`` is not a tensor with axes.
    """
    if not isinstance(value, Tensor) or not value.ndim:
        return None
    return {0: _BATCH, 1: _SEQUENCE} if value.ndim == len(_TOKENS) else {0: _BATCH}
