"""Forms in which models hold the experts of a mixture fused, each read as one matrix for every expert and projection.

Nothing is copied: matrices are views of the fused parameters. Source: the experts interface of transformers 5, and its models that do not
follow it, whose form `quark.config.architecture.Architecture.expert_form` states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from quark.config.architecture import ExpertForm
from quark.hf.internals import apply_gate
from quark.modules.experts import ExpertParts

__all__ = ["expert_parts"]

_GATE, _UP, _DOWN, _GATE_UP = "gate_proj", "up_proj", "down_proj", "gate_up_proj"
_ACTIVATIONS = ("act_fn", "activation_fn")


def expert_parts(module: nn.Module, form: ExpertForm, inputs: Sequence[str], output: str) -> ExpertParts | None:
    """Return a fused mixture taken apart, or None where the module is none of that form.

    Args:
        module: Any module; its parameters may be on the meta device.
        form: Of the family's mixtures. What the class of a module says of itself goes before it.
        inputs: Names of the projections that read an expert's input, gate first; where parameters are stacked, their own names.
        output: Name of the one that closes it.
    """
    parts = _of_interface(module)
    if parts is None and form == "sorted":
        parts = _of_sorted(module)
    if parts is None and form == "stacked":
        parts = _of_stacked(module, (*inputs, output))
    return parts


def _of_interface(module: Any) -> ExpertParts | None:
    pair = _pair(module)
    if pair is None or not getattr(module, "has_gate", False) or getattr(module, "has_post_expert_norm", False):
        return None
    up, down = (p.transpose(1, 2) for p in pair) if module.is_transposed else pair
    # Models define what lies between the matrices on their own class: a copy of it, without its weights, is asked.
    shell = copy.copy(module)
    shell._parameters = {}
    biases = {name: module._parameters[f"{name}_bias"] for name in (_GATE_UP, _DOWN)} if module.has_bias else {}
    if not module.is_concatenated:
        return ExpertParts({_GATE_UP: up, _DOWN: down}, biases, partial(apply_gate, shell))
    halves = dict(zip((_GATE, _UP), biases[_GATE_UP].chunk(2, dim=1), strict=True)) | {_DOWN: biases[_DOWN]} if biases else {}
    return ExpertParts(_halved(up, down), halves, partial(apply_gate, shell))


def _of_sorted(module: nn.Module) -> ExpertParts | None:
    pair, activation = _pair(module), _activation(module)
    if pair is None or activation is None:
        return None
    up, down = (p.transpose(1, 2) for p in pair)
    return ExpertParts(_halved(up, down), {}, partial(_activated, activation), sorted_tokens=True)


def _of_stacked(module: nn.Module, names: Sequence[str]) -> ExpertParts | None:
    """Return matrices of all experts one below the other, in the module or the one around them; the closing ones lie transposed."""
    count, activation = getattr(module, "num_experts", None), _activation(module)
    own = {name.rpartition(".")[2]: p for name, p in module.named_parameters()}
    if not isinstance(count, int) or activation is None or own.keys() != set(names):
        return None
    weights = {name: own[name].detach().unflatten(0, (count, -1)) for name in names}
    return ExpertParts(weights | {names[-1]: weights[names[-1]].transpose(1, 2)}, {}, partial(_activated, activation))


def _pair(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    pair = [p.detach() for name in (_GATE_UP, _DOWN) if (p := module._parameters.get(name)) is not None and p.ndim == 3]
    return (pair[0], pair[1]) if len(pair) == 2 else None


def _halved(up: Tensor, down: Tensor) -> dict[str, Tensor]:
    return {**dict(zip((_GATE, _UP), up.chunk(2, dim=1), strict=True)), _DOWN: down}


def _activation(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return what the gate passes, in the module or the one that holds its matrices."""
    functions = (getattr(m, name) for m in module.modules() for name in _ACTIVATIONS if hasattr(m, name))
    return next(functions, None)


def _activated(activation: Callable[[Tensor], Tensor], outputs: Sequence[Tensor]) -> Tensor:
    gate, up = outputs
    return activation(gate) * up
