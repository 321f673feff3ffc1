"""The state of a module: whether an algorithm has changed its values, modules or hooks."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from quark.base.finite import is_finite
from quark.base.parallel import one_thread

__all__ = ["digests_of", "has_finite_values", "state_of"]

_COLUMNS, _ROWS = 509, 512
"""Words of 8 bytes in a row, a prime number, and rows whose columns are summed: 2 MB, which a cache holds."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")


def state_of(module: nn.Module) -> tuple[Any, ...]:
    """Return the state of a module: equal to another where parts, hooks and values are the same."""
    parts = tuple((name, id(part), _hooks(part)) for name, part in module.named_modules())
    return parts, digests_of(module)


def has_finite_values(parameter: Tensor) -> bool:
    """Return whether no element is NaN or infinite; true of integers, and on the meta device."""
    return parameter.is_meta or not parameter.is_floating_point() or is_finite(parameter.detach())


def digests_of(module: nn.Module, *, without: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Return a digest of the values of each tensor of a module, by name; of meta tensors none.

    The words of a tensor are laid out in rows of a prime number of words, and its digest is the sum of each
    column of each block of rows. So a change of one value changes it, and so does an exchange of channels:
    their distance is no multiple of that prime number, unless they are thousands of channels apart. Each byte
    is read once, and the host waits for an accelerator once.

    Args:
        module: The module.
        without: Beginnings of the names of tensors that are left out.
    """
    tensors = chain(module.named_parameters(), module.named_buffers())
    with one_thread():
        sums = {n: _column_sums(t.detach()) for n, t in tensors if not (t.is_meta or n.startswith(without))}
    values = torch.cat([each.to(next(iter(sums.values())).device) for each in sums.values()]).cpu() if sums else torch.empty(0)
    parts = values.split([len(each) for each in sums.values()])
    return {name: part.numpy().tobytes() for name, part in zip(sums, parts, strict=True)}


def _column_sums(tensor: Tensor) -> Tensor:
    """Return the sums of the columns of each block of a tensor's words, int64 ``[n]``."""
    data = tensor.reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8 or data.data_ptr() % 8:
        data = data.clone()
    rest = len(data) % (8 * _COLUMNS)
    rows = data[: len(data) - rest].view(torch.int64).view(-1, _COLUMNS)
    last = torch.nn.functional.pad(data[len(data) - rest :], (0, -rest % 8)).view(torch.int64)
    return torch.cat([*(block.sum(0) for block in rows.split(_ROWS)), last])


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    """Return the hooks of a module, of every kind, by their numbers."""
    return tuple(tuple((getattr(module, name, None) or {}).items()) for name in _HOOKS)
