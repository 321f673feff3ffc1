"""Functions that capture a model as a graph of torch operators, and that check a graph."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from quark.base.names import folded
from quark.base.tracing import tracing
from quark.errors import ConfigError, UnsupportedError
from quark.models.layers import QuantizerModule
from quark_graph.operators import arguments, schema_name

__all__ = ["GUARDS", "capture", "refuse_unfit_graph"]

GUARDS = "_guards_fn"
"""Name of the submodule that checks input shapes in a graph of torch.export."""

_TRAINING = {"aten::batch_norm": "training", "aten::dropout": "train", "aten::feature_dropout": "train", "aten::alpha_dropout": "train"}
_HOW = "Capture the model with quark_graph.capture(model, example_inputs), or torch.export.export(model, example_inputs).module()"


def capture(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, *, dynamic_batch: bool = True
) -> fx.GraphModule:
    """Capture a model with ``torch.export``, and return the graph.

    The graph shares the parameters of the model.

    Args:
        model: The model in inference mode (``model.eval()``).
        args: Example arguments. Only their shapes matter.
        kwargs: Example keyword arguments.
        dynamic_batch: Whether axis 0 of the arguments may have another size than in the example, if the model
            allows this. If the size in the example is 1, it must always be 1.

    Raises:
        ConfigError: The model is in training mode.
        UnsupportedError: torch.export cannot capture the model, for example because a branch depends on
            tensor values.
    """
    training = [name or "the model" for name, module in model.named_modules() if module.training and not list(module.children())]
    if training:
        raise ConfigError(f"{len(training)} module(s) are in training mode ({folded(training)}). Call model.eval() before the capture")
    shapes: Any = torch.export.ShapesCollection()
    for value in tree_leaves((args, kwargs)):
        if dynamic_batch and isinstance(value, Tensor) and value.ndim:
            shapes[value] = {0: torch.export.Dim.AUTO}
    try:
        with tracing() as programs, torch.no_grad():
            programs.append(torch.export.export(model, args, dict(kwargs or {}), dynamic_shapes=shapes))
            return programs[0].module()
    except Exception as error:
        cause = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise UnsupportedError(
            f"torch.export cannot capture this {type(model).__name__} as a graph ({type(error).__name__}: {cause}). Branches and shapes "
            "that depend on values of tensors cannot be captured. Rewrite them with torch.where or torch.cond, or use "
            "quant_mode=QuantizationMode.eager_mode, which needs no graph"
        ) from error


def refuse_unfit_graph(model: fx.GraphModule) -> None:
    """Raise an error unless a graph has only torch operators, is in inference mode, and is not quantized.

    Raises:
        ConfigError: The graph has other nodes, is in training mode, or has quantizers.
    """
    if any(isinstance(module, QuantizerModule) for module in model.modules()):
        raise ConfigError("this graph is quantized already. To quantize it in another way, capture the float model again")
    foreign = [node.name for node in model.graph.nodes if _is_foreign(node)]
    if foreign:
        raise ConfigError(
            f"{len(foreign)} node(s) of this graph are not torch operators ({folded(foreign)}). Graphs of torch.fx.symbolic_trace have "
            f"such nodes. {_HOW}"
        )
    if bare := [node.name for node in model.graph.nodes if schema_name(node) and "val" not in node.meta]:
        raise ConfigError(f"{len(bare)} node(s) of this graph have no output metadata ({folded(bare)}). {_HOW}")
    training = [node.name for node in model.graph.nodes if (name := _TRAINING.get(schema_name(node) or "")) and arguments(node).get(name)]
    if training:
        raise ConfigError(
            f"{len(training)} operator(s) of this graph are in training mode ({folded(training)}). First call model.eval(). {_HOW}"
        )


def _is_foreign(node: fx.Node) -> bool:
    if node.op == "call_module":
        return node.target != GUARDS
    if node.op == "call_method":
        return True
    is_of_torch = isinstance(node.target, torch._ops.OpOverload | torch._ops.HigherOrderOperator)
    # Graphs compute sizes with functions of Python's module ``operator`` and of torch's symbolic numbers.
    is_of_sizes = node.target is operator.getitem or not isinstance(node.meta.get("val", torch.empty(0)), Tensor)
    return node.op == "call_function" and not is_of_torch and not is_of_sizes
