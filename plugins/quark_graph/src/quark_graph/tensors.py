"""Parameters of a graph module by the nodes that read them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

__all__ = ["free_path", "set_parameter", "value_of"]


def value_of(model: fx.GraphModule, node: fx.Node) -> Tensor:
    """Return the parameter, or buffer, that a ``get_attr`` node reads."""
    return attrgetter(str(node.target))(model)


def set_parameter(
    model: fx.GraphModule, readers: Sequence[fx.Node], argument: fx.Node | None, name: str, path: str, value: Tensor
) -> fx.Node:
    """Let some nodes read ``value`` as an argument, and return the ``get_attr`` node.

    Args:
        model: The graph module, which gets the parameter. The old tensor does not change.
        readers: The nodes whose argument changes.
        argument: The ``get_attr`` node that they read so far, or None. Other readers keep the old value.
        name: Name of the argument in the operators' schema.
        path: Full name of the parameter if ``argument`` has other readers, or there is none.
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
    """Return ``path``, followed by a number if the name is taken."""
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
