"""Functions that return the matrix of each expert and projection in a module with fused experts.

The matrices are views of the fused parameters, so nothing is copied. transformers 5 defines an interface for
fused experts. If a model does not use it, `quark.config.architecture.Architecture.expert_parts` separates the
experts.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quark.config.architecture import Architecture
from quark.models.hf.internals import apply_gate
from quark.models.layers.experts import ExpertParts

_GATE, _UP, _DOWN, _GATE_UP = "gate_proj", "up_proj", "down_proj", "gate_up_proj"


def expert_parts(module: nn.Module, architecture: Architecture) -> ExpertParts | None:
    """Return the parts of a module with fused experts, or None if ``module`` is another module.

    Args:
        module: Any module. Its parameters may be on the meta device.
        architecture: Architecture of the model family. It is ignored if the module uses transformers'
            interface for fused experts.
    """
    parts = _of_interface(module)
    if parts is None and architecture.expert_parts is not None:
        names = (*architecture.expert_inputs, architecture.expert_output)
        return architecture.expert_parts.load()(module, names)
    return parts


def _of_interface(module: Any) -> ExpertParts | None:
    """Return the parts of a module that uses transformers' interface for fused experts, or None."""
    pair = _pair(module)
    if pair is None or not getattr(module, "has_gate", False) or getattr(module, "has_post_expert_norm", False):
        return None
    up, down = (p.transpose(1, 2) for p in pair) if module.is_transposed else pair
    # The gate is a method of the class of the model. A copy of the module without weights is enough to call
    # it.
    shell = copy.copy(module)
    shell._parameters = {}
    biases = {name: module._parameters[f"{name}_bias"] for name in (_GATE_UP, _DOWN)} if module.has_bias else {}
    if not _is_concatenated(module, up.shape[1]):
        return ExpertParts({_GATE_UP: up, _DOWN: down}, biases, partial(apply_gate, shell))
    halves = _halved(biases[_GATE_UP], biases[_DOWN]) if biases else {}
    return ExpertParts(_halved(up, down), halves, partial(apply_gate, shell))


def _is_concatenated(module: Any, width: int) -> bool:
    """Return whether the fused matrix has all outputs of gate first and then all outputs of up.

    The alternative is that both are interleaved. transformers has an attribute for this since 5.8. With older
    releases, this function calls the gate of the model with NaN at index 1. If the first result is NaN, both
    are interleaved.
    """
    stated = getattr(module, "is_concatenated", None)
    if stated is not None:
        return bool(stated)
    outputs = torch.ones(width, device="cpu", dtype=torch.float32)
    outputs[1] = torch.nan
    return not bool(module._apply_gate(outputs)[0].isnan())


def _pair(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Return the fused matrices of gate and up, and of down, or None if the module does not have them."""
    pair = [p.detach() for name in (_GATE_UP, _DOWN) if (p := module._parameters.get(name)) is not None and p.ndim == 3]
    return (pair[0], pair[1]) if len(pair) == 2 else None


def _halved(up: Tensor, down: Tensor) -> dict[str, Tensor]:
    """Return separate tensors of gate, up and down. The first half of ``up`` belongs to the gate."""
    return {**dict(zip((_GATE, _UP), up.chunk(2, dim=1), strict=True)), _DOWN: down}
