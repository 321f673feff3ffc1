"""Missing and unexpected tensors of a checkpoint: which a model class ignores, and which are refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quark.base.names import folded
from quark.errors import CheckpointError

_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}  # all of these hold numbers; all other dtypes hold codes


def misfit(stored: Tensor, wanted: Tensor) -> str | None:
    """Return how a stored tensor differs in shape or dtype from the model's tensor; None if it fits.

    Both may be meta tensors. A single number may have the shape ``[]`` or ``[1]``.
    """
    if stored.shape != wanted.shape and not stored.numel() == wanted.numel() == 1:
        return f"has the shape {list(stored.shape)} instead of {list(wanted.shape)}"
    if stored.dtype != wanted.dtype and not {stored.dtype, wanted.dtype} <= _FLOATS:
        return f"has the dtype {stored.dtype} instead of {wanted.dtype}"
    return None


def without_source(state: Mapping[str, Tensor], names: Iterable[str]) -> Iterator[str]:
    """Yield the names in a state whose tensor is not among the tensors of ``names``.

    Args:
        state: Tensors by full name; ``state_dict(keep_vars=True)``, in which tied names have one object.
        names: Names that were read; names outside the state are ignored.
    """
    have = {id(state[name]) for name in names if name in state}
    return (name for name, tensor in state.items() if id(tensor) not in have)


def refuse_missing(names: Sequence[str], model: nn.Module, directory: Path) -> None:
    """Raise CheckpointError if a checkpoint lacks ``names``, tensors of its model."""
    if names:
        raise CheckpointError(
            f"'{directory}' lacks {len(names)} tensor(s) of a {type(model).__name__}: {folded(names)}. It is incomplete, or its "
            "config.json is of another model"
        )


def may_lack(model: nn.Module) -> Callable[[str], bool]:
    """Return a function that says whether a model class lets a checkpoint lack a tensor, by its full name.

    The class computes such a tensor itself: Marian's positions, and BART's ``final_logits_bias``.
    """
    patterns = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
    return lambda name: any(pattern.search(name) for pattern in patterns)


def refuse_lost(names: Sequence[str], model: nn.Module, directory: Path) -> None:
    """Raise if stored tensors would be lost because others have taken their places in the model.

    Args:
        names: Stored tensors that no tensor of the model is made from, and no export copies.
        model: Its class says which tensors may be left out (`left_out_by`).
        directory: The checkpoint, for the message.

    Raises:
        CheckpointError: A tensor would be lost.
    """
    is_left_out = left_out_by(model)
    if lost := [name for name in names if not is_left_out(name)]:
        raise CheckpointError(
            f"a {type(model).__name__} has no place for {len(lost)} tensor(s) of '{directory}', because others replace them: "
            f"{folded(lost)}. Its config.json may be of another model: correct it, or remove these tensors from the files"
        )


def left_out_by(model: nn.Module, carried: Collection[str] = ()) -> Callable[[str], bool]:
    """Return a function that says whether a model class ignores a stored tensor.

    DeepSeek-V3 ignores its layers for multi-token prediction. ``carried`` are names that an export lists
    because its model has no such module or tensor (`quark.models.plan.quant_plan.QuantPlan.carried_names`).

    The patterns of a class are meant for tensors that the model lacks, but match others too: GPT-2's
    ``attn.bias`` matches ``c_attn.bias``. So tensors of a module that stores tensors are never ignored.
    """
    patterns = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    storing = {name for name, module in model.named_modules() if patterns and _stores(module)}
    without_place = set(carried) - {name for name, _ in model.named_modules()}
    return lambda name: (
        not without_place.isdisjoint((name, owner := name.rpartition(".")[0]))
        or (owner not in storing and any(pattern.search(name) for pattern in patterns))
    )


def beside_others(model: nn.Module) -> Callable[[str], bool]:
    """Return a function that says whether an unexpected tensor's module is in the model and stores tensors.

    In a quantized checkpoint, such a tensor is usually a scale, and the module is wrong without it. A
    tensor of a module that the model lacks belongs to another part, which its class ignores.
    """
    storing = {name for name, module in model.named_modules() if _stores(module)}
    return lambda name: name.rpartition(".")[0] in storing


def refuse_unannounced(names: Sequence[str], directory: Path | str) -> None:
    """Raise CheckpointError if a checkpoint has ``names``, which its quantization does not announce."""
    if names:
        raise CheckpointError(
            f"'{directory}' holds {folded(names)}, which its quantization_config does not announce: config.json was changed, or is of "
            "another checkpoint. Make or fetch the export again"
        )


def recomputed_by(model: Any) -> Callable[[str], bool]:
    """Return a function that says whether a transformers model computes a stored tensor itself.

    An export can leave such a tensor out. There are two kinds. Either the model has a computed buffer with
    the same last two names: ``rotary_emb.inv_freq``, which older releases had in every layer. Or the model
    has the tensor's module, and its class ignores the tensor: the masks ``attn.bias`` of GPT-2.
    """
    expects, prefix = left_out_by(model), f"{model.base_model_prefix}."
    modules = {name.removeprefix(prefix) for name, _ in model.named_modules()}
    computed = {_last_two(name) for name, _ in model.named_non_persistent_buffers()}
    return lambda name: _last_two(name) in computed or (name.removeprefix(prefix).rpartition(".")[0] in modules and expects(name))


def _last_two(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _stores(module: nn.Module) -> bool:
    """Return whether a module itself, without its submodules, has a tensor in its state."""
    buffers = {leaf: buffer for leaf, buffer in module._buffers.items() if leaf not in module._non_persistent_buffers_set}
    return any(tensor is not None for tensor in (*module._parameters.values(), *buffers.values()))
