"""Separate experts: a mixture of experts with fused parameters as one linear layer per matrix.

Layers are named as in checkpoints and runtimes, ``experts.3.down_proj``. So each expert is planned,
calibrated on its routed tokens, rounded and exported like any other layer. Weights are views of the fused
parameters: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor, nn

from quark.errors import UnsupportedError

_M = TypeVar("_M", bound=nn.Module)


@attrs.frozen(eq=False)
class ExpertParts:
    """The matrices of a fused mixture, and how its experts compute.

    Attributes:
        weights: Weights by name of the projection, ``[experts, out, in]``; the last one is the output
            projection of an expert.
        biases: Biases by the same names, ``[experts, out]``; empty if there are none.
        gate: Returns the input of the output projection from the outputs of the other projections.
        separate: Returns the module that replaces the mixture, if it has other arguments than
            `SeparateExperts`.
    """

    weights: dict[str, Tensor]
    biases: dict[str, Tensor]
    gate: Callable[[Sequence[Tensor]], Tensor]
    separate: Callable[[ExpertParts], SeparateExperts] | None = None


class Expert(nn.Module):
    """The layers of one expert; `SeparateExperts` computes the activation between them."""


class SeparateExperts(nn.Module):
    """Computes the output of a fused mixture expert by expert.

    The experts are its children, named by their numbers.

    Args:
        parts: The matrices of the fused mixture, which are shared.

    Attributes:
        shows_all: Whether every expert runs on every token, for calibration; the output does not change.
        layer_names: Names of the layers of one expert; the last is the output projection.
    """

    shows_all = False

    def __init__(self, parts: ExpertParts) -> None:
        super().__init__()
        self.layer_names = tuple(parts.weights)
        self._gate = parts.gate
        for index in range(parts.weights[self.layer_names[-1]].shape[0]):
            self.add_module(str(index), _expert(parts, index))

    # Models name the last two arguments differently; all pass them in this order.
    def forward(self, hidden_states: Tensor, chosen: Tensor | None = None, weights: Tensor | None = None, **named: Any) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts.

        Args:
            hidden_states: ``[..., hidden]``; the other axes together are the tokens.
            chosen: Indices of the experts of each token, ``[tokens, k]``; an index beyond the last expert
                means none.
            weights: Router weights of these experts, ``[tokens, k]``.
            **named: ``chosen`` as ``top_k_index`` or ``router_indices``, and ``weights`` as ``top_k_weights``
                or ``routing_weights``.

        Raises:
            UnsupportedError: The model does not pass the experts' indices and weights.
        """
        chosen = chosen if chosen is not None else named.get("top_k_index", named.get("router_indices"))
        weights = weights if weights is not None else named.get("top_k_weights", named.get("routing_weights"))
        if chosen is None or weights is None:
            raise UnsupportedError(
                f"this model calls its experts with {', '.join(named) or 'their input alone'}, but without the experts' indices and "
                "weights (top_k_index, top_k_weights), so they cannot run as separate layers. Exclude them"
            )
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        result = torch.zeros_like(tokens)
        for index in range(len(self._modules)) if self.shows_all else chosen.unique().tolist():
            expert = self._modules.get(str(index))
            if expert is not None:
                token, place = torch.where(chosen == index)
                output = self.run_expert(expert, tokens)[token] if self.shows_all else self.run_expert(expert, tokens[token])
                result.index_add_(0, token, (output * weights[token, place, None]).to(result.dtype))
        return result.view_as(hidden_states)

    def run_expert(self, expert: nn.Module, x: Tensor) -> Tensor:
        """Return the output of one expert, a child of this module, for its tokens ``[tokens, hidden]``."""
        *inputs, last = self.layer_names
        return getattr(expert, last)(self._gate([getattr(expert, name)(x) for name in inputs]))


def separated(parts: ExpertParts) -> SeparateExperts:
    """Return the module that replaces a fused mixture of these parts, with the same arguments."""
    return (parts.separate or SeparateExperts)(parts)


@contextmanager
def showing_all(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Run every expert of ``model`` on every token while the body runs, if ``wanted``."""
    mixtures = [m for m in model.modules() if isinstance(m, SeparateExperts)] if wanted else []
    for mixture in mixtures:
        mixture.shows_all = True
    try:
        yield
    finally:
        for mixture in mixtures:
            mixture.shows_all = False


def _expert(parts: ExpertParts, index: int) -> Expert:
    expert = _bare(Expert)
    for name, weight in parts.weights.items():
        bias = parts.biases.get(name)
        expert._modules[name] = _linear(weight[index], None if bias is None else bias[index])
    return expert


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = _bare(nn.Linear)
    layer.out_features, layer.in_features = weight.shape
    layer._parameters["weight"] = nn.Parameter(weight.detach(), requires_grad=False)
    layer._parameters["bias"] = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
    return layer


# A mixture may have a hundred thousand layers. The constructor of nn.Linear would draw random weights, and
# that of nn.Module takes longer than the rest of a plan.
def _bare(kind: type[_M]) -> _M:
    """Return a module of that class with only the state that ``nn.Module.__init__`` sets."""
    module = kind.__new__(kind)
    module.__dict__.update({name: value.copy() if isinstance(value, dict | set) else value for name, value in _new_state().items()})
    return module


@cache
def _new_state() -> dict[str, Any]:
    return nn.Module().__dict__
