"""Functions that return and replace the parameters of nodes in a graph module."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

__all__ = ["free_path", "set_parameter", "value_of"]


def value_of(model: fx.GraphModule, node: fx.Node) -> Tensor:
    """Return the parameter or buffer that a ``get_attr`` node reads."""
    return attrgetter(str(node.target))(model)


def set_parameter(
    model: fx.GraphModule, readers: Sequence[fx.Node], argument: fx.Node | None, name: str, path: str, value: Tensor
) -> fx.Node:
    """Replace an argument of some nodes by a new parameter, and return the ``get_attr`` node of the
    parameter.

    Args:
        model: The graph module to which the parameter is added. The old tensor does not change.
        readers: The nodes whose argument changes.
        argument: The ``get_attr`` node that is replaced, or None if the nodes do not have the argument yet.
            Other readers of this node continue to read the old value.
        name: Name of the argument in the schema of the operators.
        path: Full name of the new parameter. It is used if ``argument`` is None or has other readers.
        value: The new value.
    """
    if argument is not None and all(reader in readers for reader in _readers(model.graph, argument)):
        _register(model, str(argument.target), value)
        return argument
    target = free_path(model, path)
    _register(model, target, value)
    with model.graph.inserting_before(min(readers)):
        node = model.graph.get_attr(target)
    node.meta["val"] = torch.empty_like(value, device="meta")
    for reader in readers:
        _set_argument(reader, name, node)
    return node


def _register(model: fx.GraphModule, path: str, value: Tensor) -> None:
    owner, _, name = path.rpartition(".")
    try:
        module = model.get_submodule(owner)
    except AttributeError:
        module = nn.Module()
        model.add_submodule(owner, module)
    module._parameters.pop(name, None)
    module._buffers.pop(name, None)
    module.register_parameter(name, nn.Parameter(value.detach(), requires_grad=False))


def _readers(graph: fx.Graph, argument: fx.Node) -> list[fx.Node]:
    return [reader for node in graph.nodes if node.op == "get_attr" and node.target == argument.target for reader in node.users]


def _set_argument(node: fx.Node, name: str, value: Any) -> None:
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    place = names.index(name)
    if place < len(node.args):
        node.update_arg(place, value)
    else:
        node.update_kwarg(name, value)


def free_path(model: nn.Module, path: str) -> str:
    """Return ``path``, followed by a number if the model already has an attribute ``path``."""
    number, candidate = 0, path
    while not _is_free(model, candidate):
        number += 1
        candidate = f"{path}_{number}"
    return candidate


def _is_free(model: nn.Module, path: str) -> bool:
    owner: Any = model
    *parents, last = path.split(".")
    for part in parents:
        if not hasattr(owner, part):
            return True
        owner = getattr(owner, part)
        if not isinstance(owner, nn.Module):
            return False
    return not hasattr(owner, last)
