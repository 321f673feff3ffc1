"""Separate experts for families with fused experts outside transformers' experts interface.

They are `Architecture.expert_parts`.

An expert computes ``down(act(gate(x)) * up(x))`` with the activation of the module. Matrices are views of the
fused parameters.
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
    """Return experts with ``gate_up_proj`` ``[E, H, 2 I]``, gate first, and ``down_proj`` ``[E, I, H]``.

    None for another module.

    The module is called with every token once per expert, ``[E · tokens, H]``, already multiplied by the
    router's weight, which is zero for tokens that the expert does not get.
    """
    fused, activation = [module._parameters.get(name) for name in ("gate_up_proj", "down_proj")], _activation(module)
    if activation is None or any(p is None or p.ndim != 3 for p in fused):
        return None
    up, down = (p.detach().transpose(1, 2) for p in fused if p is not None)
    weights = dict(zip(names, (*up.chunk(2, dim=1), down), strict=True))
    return ExpertParts(weights, {}, partial(_activated, activation), SeparateSortedExperts)


def stacked_experts(module: nn.Module, names: Sequence[str]) -> ExpertParts | None:
    """Return experts with one parameter ``[E · I, H]`` per projection, in the module or one below it.

    None for another module.

    As in the interface, the module is called with tokens, indices and weights.
    """
    count, activation = getattr(module, "num_experts", None), _activation(module)
    own = {name.rpartition(".")[2]: p for name, p in module.named_parameters()}
    if not isinstance(count, int) or activation is None or own.keys() != set(names):
        return None
    weights = {name: own[name].detach().unflatten(0, (count, -1)) for name in names}
    return ExpertParts(weights | {names[-1]: weights[names[-1]].transpose(1, 2)}, {}, partial(_activated, activation))


def _activation(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return the activation function of the module, or of the module with its matrices."""
    functions = (getattr(m, name) for m in module.modules() for name in _ACTIVATIONS if hasattr(m, name))
    return next(functions, None)


def _activated(activation: Callable[[Tensor], Tensor], outputs: Sequence[Tensor]) -> Tensor:
    gate, up = outputs
    return activation(gate) * up


class SeparateSortedExperts(SeparateExperts):
    """Separate experts for a mixture that is called with every token once per expert.

    Tokens are weighted by the router, and zero if not routed.

    An expert runs on the tokens that are not zero; without biases, the output of a zero token is zero.
    """

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the output of each expert for its tokens.

        Args:
            hidden_states: ``[experts · tokens, hidden]``, expert by expert.

        Returns:
            A tensor of the same shape; zero for zero tokens.
        """
        tokens = hidden_states.view(len(self._modules), -1, hidden_states.shape[-1])
        routed = tokens.ne(0).any(-1)
        result = torch.zeros_like(tokens)
        # The router weights of experts that are not chosen are not known here: other experts see the sum of
        # the weighted tokens.
        shown = tokens.sum(0) if self.shows_all else None
        for index in range(len(self._modules)) if self.shows_all else routed.any(1).nonzero().flatten().tolist():
            expert, is_routed = self._modules[str(index)], routed[index]
            assert expert is not None
            if shown is not None:
                result[index, is_routed] = self.run_expert(expert, torch.where(is_routed[:, None], tokens[index], shown))[is_routed]
            else:
                result[index, is_routed] = self.run_expert(expert, tokens[index, is_routed])
        return result.view_as(hidden_states)
