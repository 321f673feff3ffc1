"""Functions that separate the fused experts of a module into one matrix for each expert and projection.

The matrices are views of the fused parameters, so nothing is copied. transformers 5 defines an interface for
fused experts. If a model does not use this interface, the function in
`quark.config.architecture.Architecture.expert_parts` separates the experts.
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
    """Return the `ExpertParts` of a module with fused experts, or None if ``module`` has no fused experts.

    Args:
        module: Any module. Its parameters may be on the meta device.
        architecture: Architecture of the model family. This argument is ignored if the module uses
            transformers' interface for fused experts.
    """
    parts = _of_interface(module)
    if parts is None and architecture.expert_parts is not None:
        names = (*architecture.expert_inputs, architecture.expert_output)
        return architecture.expert_parts.load()(module, names)
    return parts


def _of_interface(module: Any) -> ExpertParts | None:
    """Return the `ExpertParts` of a module, or None if it does not use transformers' interface for fused
    experts."""
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
    """Return whether the fused matrix has all outputs of the gate projection, followed by all outputs of the
    up projection.

    In other models, the outputs of the two projections alternate. Since release 5.8, transformers has an
    attribute that says which of the two is the case. With older releases, this function calls the gate
    function of the model with ``width`` numbers. The number at index 1 is NaN, and the other numbers are 1.
    If the first result is NaN, the outputs alternate.
    """
    stated = getattr(module, "is_concatenated", None)
    if stated is not None:
        return bool(stated)
    outputs = torch.ones(width, device="cpu", dtype=torch.float32)
    outputs[1] = torch.nan
    return not bool(module._apply_gate(outputs)[0].isnan())


def _pair(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Return two fused matrices: that of the gate and up projections, and that of the down projections.

    Return None if the module does not have both.
    """
    pair = [p.detach() for name in (_GATE_UP, _DOWN) if (p := module._parameters.get(name)) is not None and p.ndim == 3]
    return (pair[0], pair[1]) if len(pair) == 2 else None


def _halved(up: Tensor, down: Tensor) -> dict[str, Tensor]:
    """Return a dictionary from projection name to tensor. The first half of ``up`` belongs to the gate
    projection."""
    return {**dict(zip((_GATE, _UP), up.chunk(2, dim=1), strict=True)), _DOWN: down}
