"""Functions that separate fused experts. They are for model families that do not use transformers' experts
interface.

Templates refer to them as `Architecture.expert_parts`.

An expert computes ``down(act(gate(x)) * up(x))``. ``act`` is the activation function of the fused module. The
matrices of the separate experts are views of the fused parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quark.models.layers.experts import ExpertParts, SeparateExperts

_ACTIVATIONS = ("act_fn", "activation_fn")


def sorted_experts(module: nn.Module, names: Sequence[str]) -> ExpertParts | None:
    """Return the separate experts of a module with fused parameters, or None if the module has no such
    parameters.

    E is the number of experts, H is the hidden size, and I is the intermediate size. ``gate_up_proj`` has the
    shape ``[E, H, 2 I]``, and the first I columns are those of the gate. ``down_proj`` has the shape ``[E, I,
    H]``.

    The input of the module is ``[E · tokens, H]``: it has every token once per expert, multiplied by the
    router's weight for this expert. The weight is zero if the token is not routed to the expert.
    """
    fused, activation = [module._parameters.get(name) for name in ("gate_up_proj", "down_proj")], _activation(module)
    if activation is None or any(p is None or p.ndim != 3 for p in fused):
        return None
    up, down = (p.detach().transpose(1, 2) for p in fused if p is not None)
    weights = dict(zip(names, (*up.chunk(2, dim=1), down), strict=True))
    return ExpertParts(weights, {}, partial(_activated, activation), SeparateSortedExperts)


def stacked_experts(module: nn.Module, names: Sequence[str]) -> ExpertParts | None:
    """Return the separate experts of a module with one stacked parameter per projection.

    Return None if the module has other parameters.

    The parameters have the shape ``[E · I, H]``, for E experts with the hidden size H and the intermediate
    size I. They may belong to a submodule.

    The arguments of the module are tokens, expert indices and router weights, as in transformers' experts
    interface.
    """
    count, activation = getattr(module, "num_experts", None), _activation(module)
    own = {name.rpartition(".")[2]: p for name, p in module.named_parameters()}
    if not isinstance(count, int) or activation is None or own.keys() != set(names):
        return None
    weights = {name: own[name].detach().unflatten(0, (count, -1)) for name in names}
    return ExpertParts(weights | {names[-1]: weights[names[-1]].transpose(1, 2)}, {}, partial(_activated, activation))


def _activation(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return the activation function of ``module`` or of a submodule, or None if no module has an activation
    function.
    """
    functions = (getattr(m, name) for m in module.modules() for name in _ACTIVATIONS if hasattr(m, name))
    return next(functions, None)


def _activated(activation: Callable[[Tensor], Tensor], outputs: Sequence[Tensor]) -> Tensor:
    gate, up = outputs
    return activation(gate) * up


class SeparateSortedExperts(SeparateExperts):
    """Separate experts of a mixture-of-experts module whose input has every token once per expert.

    The tokens are multiplied by the router's weights, so they are zero for experts to which they are not
    routed.

    An expert computes only the tokens that are not zero. Experts have no biases, so the output of a zero
    token is zero.
    """

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the output of each expert for the tokens that are routed to it.

        Args:
            hidden_states: The input, ``[experts · tokens, hidden]``. All tokens for the first expert come
                first.

        Returns:
            A tensor of the same shape. For tokens that are zero, the output is zero.
        """
        tokens = hidden_states.view(len(self._modules), -1, hidden_states.shape[-1])
        routed = tokens.ne(0).any(-1)
        result = torch.zeros_like(tokens)
        # The router weights of experts that were not chosen are unknown here. If calibration shows all tokens
        # to all experts, these experts get the sum of the weighted tokens.
        shown = tokens.sum(0) if self.shows_all else None
        for index in range(len(self._modules)) if self.shows_all else routed.any(1).nonzero().flatten().tolist():
            expert, is_routed = self._modules[str(index)], routed[index]
            assert expert is not None
            if shown is not None:
                result[index, is_routed] = self.run_expert(expert, torch.where(is_routed[:, None], tokens[index], shown))[is_routed]
            else:
                result[index, is_routed] = self.run_expert(expert, tokens[index, is_routed])
        return result.view_as(hidden_states)
