"""Routers by the flow of data: linear layers from whose outputs a top-k chooses.

Each module runs by itself, as a copy on the meta device, so that a model in memory and one on a disk give the
same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

__all__ = ["layers_chosen_from"]

_CHOICES = frozenset({"topk", "argmax"})
_PRODUCTS = frozenset({"linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum"})
_MOST_MODULES = 2000  # in one that runs by itself: no mixture has more


def layers_chosen_from(modules: Mapping[str, nn.Module], layers: Sequence[str], blocks: str | None = None) -> set[str]:
    """Return the layers from whose outputs a module that they are in chooses the largest ones.

    Modules run with hidden states as their only argument, and as far as they come with tensors that have no
    values. Of several with the same layers one runs.

    Args:
        modules: All modules of a model, on any device, by full name.
        layers: Full names of linear layers.
        blocks: Full name of the list of blocks that all layers are in: modules in it run; None for all.
    """
    start = 0 if blocks is None else len(blocks) + 1
    inside: dict[str, dict[str, str]] = {}
    for layer in layers:
        for end in (i for i, character in enumerate(layer) if character == "." and i > start):
            inside.setdefault(layer[:end], {})[layer[end + 1 :]] = layer
    found: dict[Any, set[str]] = {}
    chosen: set[str] = set()
    for name, own in inside.items():
        kind = type(modules[name]), *((short, modules[layer].weight.shape) for short, layer in own.items())
        if kind not in found:
            found[kind] = _chosen_from(modules[name], own)
        chosen |= {own[short] for short in found[kind]}
    return chosen


def _chosen_from(module: nn.Module, layers: Mapping[str, str]) -> set[str]:
    """As `layers_chosen_from` of one module, by names in it."""
    if len(list(module.modules())) > _MOST_MODULES:
        return set()
    chosen: set[str] = set()
    with suppress(Exception), torch.device("meta"), torch.no_grad():  # whatever a model's code does with tensors without values
        tensors = (*module.parameters(), *module.buffers())
        twin = copy.deepcopy(module, {id(t): nn.Parameter(t.to("meta"), requires_grad=False) for t in tensors}).eval()
        for part in twin.modules():
            part._forward_hooks.clear()
            part._forward_pre_hooks.clear()
        weights: dict[Tensor, str] = {twin.get_parameter(f"{short}.weight"): short for short in layers}
        for width, dtype in dict.fromkeys((weight.shape[1], weight.dtype) for weight in weights):
            with suppress(Exception), _Flow(weights, chosen):
                twin(torch.empty(1, 4, width, dtype=dtype))
    return chosen


class _Flow(TorchFunctionMode):
    """Follows products with weights through operations that are no products, to where the largest are chosen.

    Args:
        weights: Names of the weights.
        chosen: Gets the names of those from whose products is chosen.
    """

    def __init__(self, weights: Mapping[Tensor, str], chosen: set[str]) -> None:
        super().__init__()
        self.chosen = chosen
        self._weights = {id(weight): {name} for weight, name in weights.items()}
        self._products: dict[int, set[str]] = {}
        self._alive: list[Any] = []  # an id is that of a tensor that is there

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        inputs, name = tree_leaves((args, kwargs)), getattr(function, "__name__", "")
        weights, products = (set().union(*(of.get(id(one), ()) for one in inputs)) for of in (self._weights, self._products))
        if name in _CHOICES:
            self.chosen |= products
        elif weights or products:
            for tensor in (one for one in tree_leaves(output) if isinstance(one, Tensor)):
                self._alive.append(tensor)
                self._products[id(tensor)] = weights if name in _PRODUCTS else products
                self._weights[id(tensor)] = set() if name in _PRODUCTS else weights
        return output
