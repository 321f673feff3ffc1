"""Functions that decide whether a missing or unexpected tensor of a checkpoint is an error."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quark.base.names import folded
from quark.errors import CheckpointError

_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}  # tensors of these dtypes hold numbers; all others may hold codes


def misfit(stored: Tensor, wanted: Tensor) -> str | None:
    """Return how a stored tensor differs in shape or dtype from the model's tensor, or None if it fits.

    Both tensors may be meta tensors. The shapes ``[]`` and ``[1]`` fit each other, because both tensors then
    have one element.
    """
    if stored.shape != wanted.shape and not stored.numel() == wanted.numel() == 1:
        return f"has the shape {list(stored.shape)} instead of {list(wanted.shape)}"
    if stored.dtype != wanted.dtype and not {stored.dtype, wanted.dtype} <= _FLOATS:
        return f"has the dtype {stored.dtype} instead of {wanted.dtype}"
    return None


def without_source(state: Mapping[str, Tensor], names: Iterable[str]) -> Iterator[str]:
    """Yield the names in ``state`` whose tensors were not read.

    Args:
        state: The result of ``state_dict(keep_vars=True)``. In it, all names of a tied tensor have the same
            tensor object, so it is enough that one of them was read.
        names: Names of the tensors that were read. Names that ``state`` does not contain are ignored.
    """
    have = {id(state[name]) for name in names if name in state}
    return (name for name, tensor in state.items() if id(tensor) not in have)


def refuse_missing(names: Sequence[str], model: nn.Module, directory: Path) -> None:
    """Raise CheckpointError if ``names`` is not empty.

    ``names`` are the full names of the tensors of ``model`` that a checkpoint lacks.
    """
    if names:
        raise CheckpointError(
            f"'{directory}' lacks {len(names)} tensor(s) of a {type(model).__name__}: {folded(names)}. It is incomplete, or its "
            "config.json is of another model. Fetch the checkpoint again, or correct config.json"
        )


def may_lack(model: nn.Module) -> Callable[[str], bool]:
    """Return a function from full name of a tensor to whether a checkpoint of ``model`` may lack the tensor.

    A checkpoint may lack a tensor that the model class computes itself. Examples are the positions of Marian
    and ``final_logits_bias`` of BART.
    """
    patterns = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
    return lambda name: any(pattern.search(name) for pattern in patterns)


def refuse_lost(names: Sequence[str], model: nn.Module, directory: Path) -> None:
    """Raise an error if stored tensors would be lost because other tensors have taken their places.

    Args:
        names: Names of stored tensors that are not used to compute a tensor of the model and that an export
            does not copy.
        model: The model. The tensors that its class ignores (`left_out_by`) may be lost.
        directory: The checkpoint directory. The message names it.

    Raises:
        CheckpointError: A tensor would be lost.
    """
    is_left_out = left_out_by(model)
    if lost := [name for name in names if not is_left_out(name)]:
        raise CheckpointError(
            f"a {type(model).__name__} has no place for {len(lost)} tensor(s) of '{directory}', because other tensors replace them: "
            f"{folded(lost)}. Its config.json may be of another model: correct it, or remove these tensors from the files"
        )


def left_out_by(model: nn.Module, carried: Collection[str] = ()) -> Callable[[str], bool]:
    """Return a function from name of a stored tensor to whether the model class ignores the tensor.

    For example, DeepSeek-V3 ignores its layers for multi-token prediction. A tensor is also ignored if
    ``carried`` contains its name or the name of its module, and the model has no such module. ``carried`` are
    the names that an export lists because the model did not have these modules or tensors
    (`quark.models.plan.quant_plan.QuantPlan.carried_names`).

    The model class has patterns for the tensors that it ignores, but a pattern may match other tensors too.
    For instance, the pattern ``attn.bias`` of GPT-2 also matches ``c_attn.bias``. So a tensor is not ignored
    if its module in the model has parameters or persistent buffers.
    """
    patterns = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    storing = {name for name, module in model.named_modules() if patterns and _stores(module)}
    without_place = set(carried) - {name for name, _ in model.named_modules()}
    return lambda name: (
        not without_place.isdisjoint((name, owner := name.rpartition(".")[0]))
        or (owner not in storing and any(pattern.search(name) for pattern in patterns))
    )


def beside_others(model: nn.Module) -> Callable[[str], bool]:
    """Return a function from name of a tensor to whether the tensor's module is in the model and has tensors.

    If an unexpected tensor of a quantized checkpoint belongs to such a module, the tensor is usually a scale,
    and the module computes wrong results without this scale. If the model lacks the module, the tensor
    belongs to another part of the checkpoint, which the model class ignores.
    """
    storing = {name for name, module in model.named_modules() if _stores(module)}
    return lambda name: name.rpartition(".")[0] in storing


def refuse_unannounced(names: Sequence[str], directory: Path | str) -> None:
    """Raise CheckpointError if ``names`` is not empty.

    ``names`` are stored tensors that do not fit the ``quantization_config`` of the checkpoint.
    """
    if names:
        raise CheckpointError(
            f"'{directory}' holds {folded(names)}, but its quantization_config implies no such tensors. config.json was changed, or is "
            "of another checkpoint. Make or fetch the export again"
        )


def recomputed_by(model: Any) -> Callable[[str], bool]:
    """Return a function from name of a stored tensor to whether a transformers model computes it itself.

    An export can leave such a tensor out. There are two cases. In the first case, the model has a computed
    buffer whose name has the same last two parts as the name of the tensor. An example is
    ``rotary_emb.inv_freq``, which older releases stored in every layer. In the second case, the model has the
    module of the tensor, and the model class ignores the tensor. An example is the mask ``attn.bias`` of
    GPT-2.
    """
    expects, prefix = left_out_by(model), f"{model.base_model_prefix}."
    modules = {name.removeprefix(prefix) for name, _ in model.named_modules()}
    computed = {_last_two(name) for name, _ in model.named_non_persistent_buffers()}
    return lambda name: _last_two(name) in computed or (name.removeprefix(prefix).rpartition(".")[0] in modules and expects(name))


def _last_two(name: str) -> str:
    """Return the last two parts of a full name, such as ``rotary_emb.inv_freq``."""
    return ".".join(name.split(".")[-2:])


def _stores(module: nn.Module) -> bool:
    """Return whether a module has parameters or persistent buffers. Those of its submodules do not count."""
    buffers = {leaf: buffer for leaf, buffer in module._buffers.items() if leaf not in module._non_persistent_buffers_set}
    return any(tensor is not None for tensor in (*module._parameters.values(), *buffers.values()))
