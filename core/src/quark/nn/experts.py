"""Experts taken apart: a mixture whose weights are fused into three-dimensional parameters, as one linear layer for each matrix.

The names are those that checkpoints and runtimes use, ``experts.3.down_proj``, so that each expert is planned, calibrated on the tokens
that are routed to it, rounded and exported like any other layer. Weights are views of the fused parameters: nothing is copied.
Source: the experts interface of transformers 5.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_UP, _DOWN = "gate_up_proj", "down_proj"


def is_fused(module: nn.Module) -> bool:
    """Whether a module is a mixture of gated experts that `SeparateExperts` can stand for."""
    fused = all(isinstance(p := module._parameters.get(name), nn.Parameter) and p.ndim == 3 for name in (_UP, _DOWN))
    return fused and bool(getattr(module, "has_gate", False)) and not getattr(module, "has_post_expert_norm", False)


def expert_layers(module: nn.Module) -> tuple[str, ...]:
    """Names of the layers of one expert of a fused module; gate and up stay one matrix where their columns alternate."""
    return ("gate_proj", "up_proj", _DOWN) if module.is_concatenated else (_UP, _DOWN)


class Expert(nn.Module):
    """The layers of one expert; `SeparateExperts` knows what lies between them."""


class SeparateExperts(nn.Module):
    """What a fused mixture computes, expert by expert; they are its children, named by their numbers.

    Args:
        fused: A module with ``is_fused(fused)``; its parameters are shared.

    Attributes:
        shows_all: Whether every expert runs on every token, for those who observe it; what is computed stays the same.
    """

    shows_all = False

    def __init__(self, fused: nn.Module) -> None:
        up, down = fused._parameters[_UP], fused._parameters[_DOWN]
        assert up is not None
        assert down is not None
        super().__init__()
        for i in range(up.shape[0]):
            self.add_module(str(i), _expert(fused, up[i], down[i], i))
        # Models define what lies between the matrices on their own class: a copy of it, without its weights, is asked.
        shell = copy.copy(fused)
        shell._parameters = {}
        self._shell = (shell,)  # in a tuple, so that it is no submodule
        self.layer_names = expert_layers(fused)

    # Models name the last two arguments differently; all give them in this order.
    def forward(self, hidden_states: Tensor, chosen: Tensor | None = None, weights: Tensor | None = None, **named: Any) -> Tensor:
        """The weighted sum of what each token's experts make of it.

        Args:
            hidden_states: ``[tokens, hidden]``.
            chosen: Indices of experts, ``[tokens, k]``; one beyond the last means none.
            weights: Of the chosen, ``[tokens, k]``.
            **named: The last two under the names ``top_k_index`` or ``router_indices``, and ``top_k_weights`` or ``routing_weights``.
        """
        chosen = chosen if chosen is not None else named.get("top_k_index", named.get("router_indices"))
        weights = weights if weights is not None else named.get("top_k_weights", named.get("routing_weights"))
        assert chosen is not None
        assert weights is not None
        result = torch.zeros_like(hidden_states)
        for index in range(len(self._modules)) if self.shows_all else chosen.unique().tolist():
            expert = self._modules.get(str(index))
            if expert is not None:
                token, place = torch.where(chosen == index)
                output = self._run(expert, hidden_states)[token] if self.shows_all else self._run(expert, hidden_states[token])
                result.index_add_(0, token, (output * weights[token, place, None]).to(result.dtype))
        return result

    def _run(self, expert: nn.Module, x: Tensor) -> Tensor:
        *inputs, last = self.layer_names
        shell: Any = self._shell[0]
        gated = shell._apply_gate(torch.cat([getattr(expert, name)(x) for name in inputs], dim=-1))
        found: Tensor = getattr(expert, last)(gated)
        return found


@contextmanager
def showing_all(model: nn.Module, wanted: bool) -> Iterator[None]:
    """While the body runs, every expert of ``model`` sees every token, if ``wanted``."""
    found = [m for m in model.modules() if isinstance(m, SeparateExperts)] if wanted else []
    for mixture in found:
        mixture.shows_all = True
    try:
        yield
    finally:
        for mixture in found:
            mixture.shows_all = False


def _expert(fused: Any, up: Tensor, down: Tensor, index: int) -> Expert:
    """One expert, its weights views of the fused ones: ``up`` ``[2 I, H]``, ``down`` ``[H, I]``, or transposed."""
    if fused.is_transposed:
        up, down = up.t(), down.t()
    biases: dict[str, Tensor] = {}
    if fused.has_bias:
        biases = {_UP: fused._parameters[f"{_UP}_bias"][index], _DOWN: fused._parameters[f"{_DOWN}_bias"][index]}
    names = expert_layers(fused)
    weights = {_DOWN: down, **({_UP: up} if _UP in names else dict(zip(names, up.chunk(2), strict=False)))}
    if _UP not in names and _UP in biases:
        biases |= dict(zip(names, biases.pop(_UP).chunk(2), strict=False))
    made = Expert()
    for name in names:
        setattr(made, name, _linear(weights[name], biases.get(name)))
    return made


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer
