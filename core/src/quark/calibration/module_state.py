"""The state of a module before a plugin's algorithm changes it, and the errors in it afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.base.finite import is_finite
from quark.base.parallel import one_thread
from quark.models.layers import QuantizedLayer, QuantizerModule
from quark.numbers import on_grid
from quark.numbers.on_grid import grid_error, scales_error
from quark.plugins.expected import described

__all__ = ["LayerState", "differing", "digests_of", "has_finite_values", "hooks", "members", "state_of"]

_COLUMNS, _ROWS = 509, 512
"""Words of 8 bytes in a row, a prime number, and rows whose columns are summed: 2 MB, which a cache holds."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")


@attrs.frozen(eq=False)
class LayerState:
    """The state of a layer before it is rounded: members that stay, and the weight, which is replaced."""

    weight: Tensor
    bias: Tensor | None
    members: Mapping[str, tuple[str, ...]]
    hooks: tuple[Any, ...]
    is_tuned: bool = False

    @classmethod
    def of(cls, layer: QuantizedLayer, *, is_tuned: bool = False) -> LayerState:
        bias = None if is_tuned else getattr(layer, "bias", None)
        bias_copy = None if bias is None else bias.detach().clone()
        return cls(layer.weight, bias_copy, members(layer), hooks(layer), is_tuned)  # type: ignore[arg-type]

    def complaint(self, layer: QuantizedLayer, *, whole: bool) -> str | None:
        """Return the error in the layer after it was rounded, as a predicate; None where there is none.

        ``whole`` says whether all values are compared with their codes, or those of a sample of rows.
        """
        if (complaint := differing(self.members, members(layer))) is not None:
            return complaint
        if hooks(layer) != self.hooks:
            return "has other hooks: a rounding neither adds nor removes hooks"
        weight: Any = layer.weight
        module = layer.weight_quantizer
        assert module is not None
        if module.qparams is None and not module.quantizer.is_float:
            return "has no scales: its weight_quantizer's set_qparams was not called"
        if not isinstance(weight, nn.Parameter):
            return f"has {described(weight)} as its weight where a parameter is wanted"
        for fact in ("shape", "dtype", "device"):
            if getattr(weight, fact) != getattr(self.weight, fact):
                return f"has a weight of {fact} {getattr(weight, fact)} where {getattr(self.weight, fact)} is wanted"
        if not self.is_tuned and weight.numel() and weight.data_ptr() == self.weight.data_ptr():
            return "still has its old parameter: write rounded values to a new one, since other modules may share the old one"
        if self.bias is not None and not _same(layer.bias, self.bias):
            return "has another bias: a rounding changes only weights"
        return _grid_error(module, weight.detach(), whole=whole)


def members(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the names of a module's parameters, buffers and submodules; those that are None do not count."""
    return {
        "parameter": tuple(name for name, p in module._parameters.items() if p is not None),
        "buffer": tuple(name for name, b in module._buffers.items() if b is not None),
        "module": tuple(name for name, m in module._modules.items() if m is not None),
    }


def state_of(module: nn.Module) -> tuple[Any, ...]:
    """Return the state of a module: equal to another where parts, hooks and values are the same."""
    parts = tuple((name, id(part), hooks(part)) for name, part in module.named_modules())
    return parts, digests_of(module)


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


def differing(before: Mapping[str, tuple[str, ...]], after: Mapping[str, tuple[str, ...]]) -> str | None:
    """Return how `members` before and after differ, as a predicate; None where they do not."""
    for kind, names in before.items():
        if added := [name for name in after[kind] if name not in names]:
            return f"has a new {kind} '{added[0]}', for which a checkpoint of this model has no place"
        if removed := [name for name in names if name not in after[kind]]:
            return f"lacks its {kind} '{removed[0]}'"
    return None


def hooks(module: nn.Module) -> tuple[Any, ...]:
    """Return the hooks of a module, of every kind, by their numbers."""
    return tuple(tuple((getattr(module, name, None) or {}).items()) for name in _HOOKS)


def has_finite_values(parameter: Tensor) -> bool:
    """Return whether no element is NaN or infinite; true of integers, and on the meta device."""
    return parameter.is_meta or not parameter.is_floating_point() or is_finite(parameter.detach())


def _grid_error(module: QuantizerModule, weight: Tensor, *, whole: bool) -> str | None:
    """Return why a weight is not on the grid of its quantizer, as a predicate; None where it is.

    Codes that the weight no longer has are dropped. A weight that is checked whole gets its codes.
    """
    quantizer, qparams = module.quantizer, module.qparams
    if module.codes is not None and grid_error(quantizer, qparams, weight, module.codes, sampled=not whole) is None:
        return None
    module.codes = None
    if not whole or qparams is None:
        return grid_error(quantizer, qparams, weight, sampled=not whole)
    if (wrong := scales_error(quantizer, qparams, tuple(weight.shape))) is not None:
        return wrong
    module.codes = quantizer.codes_of(weight, qparams)
    return on_grid.off_grid(weight, quantizer.dequantize(module.codes, qparams))


def _same(value: Any, expected: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dtype == expected.dtype and torch.equal(value.detach(), expected)
