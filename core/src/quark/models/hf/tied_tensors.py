"""Functions for tensors and modules that have several full names in a model: tied tensors and shared
modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from quark.models.hf.internals import tied_on_loading


def owners_of(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return the places where a model has each of its tensors.

    The result is a dictionary from the ``id()`` of a tensor to a list of places. A place is a pair of a
    module and the name of the attribute with the tensor.
    """
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            owners.setdefault(id(tensor), []).append((module, leaf))
    return owners


def other_names(model: nn.Module) -> dict[str, list[str]]:
    """Return the other names of each module that has several full names.

    The result is a dictionary from the first full name of such a module to its other full names.
    """
    first: dict[nn.Module, str] = {}
    others: dict[str, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if (known := first.setdefault(module, name)) != name:
            others.setdefault(known, []).append(name)
    return others


def aliases(model: nn.Module) -> list[list[str]]:
    """Return groups of full names. All names of a group refer to the same tensor.

    A group has the names of one tensor that occurs in several places of the model, or the names of the
    tensors that transformers ties to each other when it loads the model.
    """
    names_of: dict[object, list[str]] = {}
    ties = tied_on_loading(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        names_of.setdefault(id(tensor), []).append(name)
    for name, source in ties.items():
        names_of.setdefault(source, [source]).append(name)
    return [names for names in names_of.values() if len(names) > 1]


@torch.no_grad()
def tie_equal(model: nn.Module, groups: Iterable[Sequence[str]]) -> None:
    """Tie the parameters of each group again if their values are equal.

    ``groups`` is the result of `aliases` before loading. Parameters with different values stay separate,
    because quantization has untied them.
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
    """Return whether two tensors have the same shape, dtype, device and values."""
    alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return one is other or (alike and torch.equal(one, other))


def module_at(model: nn.Module, name: str) -> nn.Module:
    """Return the module with the full name ``name``. This function is faster than ``get_submodule``.

    Raises:
        KeyError: There is no such module.
    """
    module: nn.Module | None = model
    for part in name.split(".") if name else ():
        module = None if module is None else module._modules.get(part)
    if module is None:
        raise KeyError(name)
    return module


def put_tensor(owners: Iterable[tuple[nn.Module, str]], tensor: Tensor) -> Tensor:
    """Replace a parameter or a buffer by ``tensor`` in several places. A place is a pair of a module and an
    attribute name.

    If the tensor replaces a parameter, it becomes a parameter. Return the tensor or the parameter.
    """
    parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
    placed = tensor
    for module, leaf in owners:
        if leaf in module._parameters:
            module._parameters[leaf] = placed = parameter
        else:
            module._buffers[leaf] = tensor
    return placed
