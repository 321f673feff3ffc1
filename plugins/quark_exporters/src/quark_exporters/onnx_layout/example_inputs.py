"""Example inputs to trace a model, and their variable axes."""

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
"""Sequences and tokens of the example; torch.export fixes an axis of length 1."""

_BATCH, _SEQUENCE = torch.export.Dim("batch"), torch.export.Dim("sequence")


@attrs.frozen(eq=False)
class ExampleInputs:
    """Arguments for tracing a model.

    Attributes:
        module: The traced module: the model, or for transformers models a wrapper that returns only the
            logits.
        args, kwargs: Its arguments.
        names: Names of the inputs in the file; if empty, the names in the module's forward stay.
        output_names: Names of the outputs; empty leaves the tracer's.
        dynamic_shapes: As in `torch.export.export`.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()
    dynamic_shapes: Any = None


def example_inputs(model: Any, given: Any = None) -> ExampleInputs:
    """Return the arguments for tracing a model.

    For a transformers model, batch and length may vary and the KV cache is left out. A graph module keeps its
    variable axes. Other models have fixed shapes.

    Args:
        model: The model.
        given: A tensor, a tuple of arguments, or a mapping of named ones; None makes token ids for a
            transformers model.

    Raises:
        UnsupportedError: The model is not from transformers, and ``given`` is None.
    """
    args, kwargs = _split(given)
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        if not args and not kwargs:
            raise UnsupportedError(
                f"this {type(model).__name__} has no default example inputs, unlike transformers models: give input_args to export_onnx "
                f"or ModelExporter.export_onnx_model"
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
    """Return the variable axes of the inputs of a graph, if each input is one tensor.

    None if shapes are fixed.
    """
    if not isinstance(model, fx.GraphModule):
        return None
    shapes = [getattr(node.meta.get("val"), "shape", ()) for node in model.graph.nodes if node.op == "placeholder"]
    axes = [{axis: torch.export.Dim.AUTO for axis, size in enumerate(shape) if isinstance(size, torch.SymInt)} for shape in shapes]
    if len(axes) != len(args) + len(kwargs) or not any(axes) or kwargs:
        return None
    return tuple(axes)


class _Logits(nn.Module):
    """Returns the logits of a transformers model, or its equivalent output."""

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
    """Return an input with at least two entries in each axis that may vary."""
    for axis in _axes_of(value) or {}:
        if value.shape[axis] == 1:
            value = value.repeat_interleave(2, axis)
    return value


def _axes_of(value: Any) -> dict[int, Any] | None:
    """Return the axes that may vary.

    Both axes of token ids and masks ``[batch, sequence]``; the first axis of other tensors.
    """
    if not isinstance(value, Tensor) or not value.ndim:
        return None
    return {0: _BATCH, 1: _SEQUENCE} if value.ndim == len(_TOKENS) else {0: _BATCH}
