"""Experts taken apart: a mixture whose weights are fused into a few parameters, as one linear layer for each matrix.

The names are those that checkpoints and runtimes use, ``experts.3.down_proj``, so that each expert is planned, calibrated on the tokens
that are routed to it, rounded and exported like any other layer. Weights are views of the fused parameters: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.errors import UnsupportedError

__all__ = ["Expert", "ExpertParts", "SeparateExperts", "SeparateSortedExperts", "separated", "showing_all"]


@attrs.frozen(eq=False)
class ExpertParts:
    """What a fused mixture is made of.

    Attributes:
        weights: By name of a projection, ``[experts, out, in]``; the last one closes an expert.
        biases: By the same names, ``[experts, out]``, where there are some.
        gate: What the last projection takes, of the outputs of the others.
        sorted_tokens: Whether it is called with every token once for each expert, weighted already.
    """

    weights: dict[str, Tensor]
    biases: dict[str, Tensor]
    gate: Callable[[Sequence[Tensor]], Tensor]
    sorted_tokens: bool = False


class Expert(nn.Module):
    """The layers of one expert; `SeparateExperts` knows what lies between them."""


class SeparateExperts(nn.Module):
    """What a fused mixture computes, expert by expert; they are its children, named by their numbers.

    Args:
        parts: Of the fused mixture; its parameters are shared.

    Attributes:
        shows_all: Whether every expert runs on every token, for those who observe it; what is computed stays the same.
        layer_names: Of the layers of one expert; the last closes it.
    """

    shows_all = False

    def __init__(self, parts: ExpertParts) -> None:
        super().__init__()
        self.layer_names = tuple(parts.weights)
        self._gate = parts.gate
        for index in range(parts.weights[self.layer_names[-1]].shape[0]):
            self.add_module(str(index), _expert(parts, index))

    # Models name the last two arguments differently; all give them in this order.
    def forward(self, hidden_states: Tensor, chosen: Tensor | None = None, weights: Tensor | None = None, **named: Any) -> Tensor:
        """The weighted sum of what each token's experts make of it.

        Args:
            hidden_states: ``[..., hidden]``, the other axes together being the tokens.
            chosen: Indices of experts, ``[tokens, k]``; one beyond the last means none.
            weights: Of the chosen, ``[tokens, k]``.
            **named: The last two under the names ``top_k_index`` or ``router_indices``, and ``top_k_weights`` or ``routing_weights``.

        Raises:
            UnsupportedError: They are not among what the model gives.
        """
        chosen = chosen if chosen is not None else named.get("top_k_index", named.get("router_indices"))
        weights = weights if weights is not None else named.get("top_k_weights", named.get("routing_weights"))
        if chosen is None or weights is None:
            raise UnsupportedError(
                f"this model calls its experts with {', '.join(named) or 'their input alone'}, and not with the choice of experts and its "
                "weights (top_k_index, top_k_weights): they cannot be worked as separate layers. Exclude them"
            )
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        result = torch.zeros_like(tokens)
        for index in range(len(self._modules)) if self.shows_all else chosen.unique().tolist():
            expert = self._modules.get(str(index))
            if expert is not None:
                token, place = torch.where(chosen == index)
                output = self._run(expert, tokens)[token] if self.shows_all else self._run(expert, tokens[token])
                result.index_add_(0, token, (output * weights[token, place, None]).to(result.dtype))
        return result.view_as(hidden_states)

    def _run(self, expert: nn.Module, x: Tensor) -> Tensor:
        *inputs, last = self.layer_names
        output: Tensor = getattr(expert, last)(self._gate([getattr(expert, name)(x) for name in inputs]))
        return output


class SeparateSortedExperts(SeparateExperts):
    """The same for a mixture that is called with every token once for each expert, weighted by the router, zero where it is not routed.

    An expert runs on the tokens that are not zero. Without biases, nothing comes of the others.
    """

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """What each expert makes of its tokens.

        Args:
            hidden_states: ``[experts · tokens, hidden]``, expert by expert.

        Returns:
            The same shape; zero where the token is.
        """
        tokens = hidden_states.view(len(self._modules), -1, hidden_states.shape[-1])
        routed = tokens.ne(0).any(-1)
        result = torch.zeros_like(tokens)
        # What weight another expert would give a token is not known here: it is shown with the weights that it has.
        shown = tokens.sum(0) if self.shows_all else None
        for index in range(len(self._modules)) if self.shows_all else routed.any(1).nonzero().flatten().tolist():
            expert, mine = self._modules[str(index)], routed[index]
            assert expert is not None
            if shown is not None:
                result[index, mine] = self._run(expert, torch.where(mine[:, None], tokens[index], shown))[mine]
            else:
                result[index, mine] = self._run(expert, tokens[index, mine])
        return result.view_as(hidden_states)


def separated(parts: ExpertParts) -> SeparateExperts:
    """The module that stands for a mixture that is made of these parts, and is called as it is."""
    return (SeparateSortedExperts if parts.sorted_tokens else SeparateExperts)(parts)


@contextmanager
def showing_all(model: nn.Module, wanted: bool) -> Iterator[None]:
    """While the body runs, every expert of ``model`` sees every token, if ``wanted``."""
    mixtures = [m for m in model.modules() if isinstance(m, SeparateExperts)] if wanted else []
    for mixture in mixtures:
        mixture.shows_all = True
    try:
        yield
    finally:
        for mixture in mixtures:
            mixture.shows_all = False


def _expert(parts: ExpertParts, index: int) -> Expert:
    expert = Expert()
    for name, weight in parts.weights.items():
        bias = parts.biases.get(name)
        setattr(expert, name, _linear(weight[index], None if bias is None else bias[index]))
    return expert


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    # Not by its constructor, which draws random weights first: of thousands of experts that takes longer than the rest of a plan.
    layer = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(layer)
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    layer.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))
    return layer
