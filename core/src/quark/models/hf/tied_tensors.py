"""Tied tensors and shared modules of a model: their names, and how to set one at all its places."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from quark.models.hf.internals import tied_on_loading


def owners_of(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return, by ``id()`` of each tensor of a model, every module and attribute that holds the tensor."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            owners.setdefault(id(tensor), []).append((module, leaf))
    return owners


def other_names(model: nn.Module) -> dict[str, list[str]]:
    """Return, by the first full name of each module that has several, its other full names."""
    first: dict[nn.Module, str] = {}
    others: dict[str, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if (known := first.setdefault(module, name)) != name:
            others.setdefault(known, []).append(name)
    return others


def aliases(model: nn.Module) -> list[list[str]]:
    """Return the full names of each tensor that has several names in a model, or that loading ties."""
    names_of: dict[object, list[str]] = {}
    ties = tied_on_loading(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        names_of.setdefault(id(tensor), []).append(name)
    for name, source in ties.items():
        names_of.setdefault(source, [source]).append(name)
    return [names for names in names_of.values() if len(names) > 1]


@torch.no_grad()
def tie_equal(model: nn.Module, groups: Iterable[Sequence[str]]) -> None:
    """Tie parameters with equal values again; ``groups`` is the result of `aliases` before loading.

    Parameters with different values, because quantization untied them, stay separate.
    """
    for names in groups:
        apart: list[Tensor] = []
        for owner, _, leaf in (name.rpartition(".") for name in names):
            module = module_at(model, owner)
            tensor = module._parameters.get(leaf)
            if tensor is None or tensor.is_meta:
                continue
            if (same := next((t for t in apart if _are_equal(t, tensor)), None)) is None:
                apart.append(tensor)
            elif same is not tensor:
                module.register_parameter(leaf, same)  # type: ignore[arg-type]


def _are_equal(one: Tensor, other: Tensor) -> bool:
    alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return one is other or (alike and torch.equal(one, other))


def module_at(model: nn.Module, name: str) -> nn.Module:
    """Return the module of that full name, in a fraction of the time of ``get_submodule``.

    Raises KeyError if there is none.
    """
    module: nn.Module | None = model
    for part in name.split(".") if name else ():
        module = None if module is None else module._modules.get(part)
    if module is None:
        raise KeyError(name)
    return module


def put_tensor(owners: Iterable[tuple[nn.Module, str]], tensor: Tensor) -> Tensor:
    """Set ``tensor`` as a parameter or buffer in each of these modules and attributes, and return it."""
    parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
    placed = tensor
    for module, leaf in owners:
        if leaf in module._parameters:
            module._parameters[leaf] = placed = parameter
        else:
            module._buffers[leaf] = tensor
    return placed
