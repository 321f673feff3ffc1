"""Classes that separate a mixture-of-experts module with fused parameters into linear layers, one for each
matrix.

The layers have the names that checkpoints and runtimes use, such as ``experts.3.down_proj``. So quark plans,
calibrates, rounds and exports the layers of each expert like any other layer. Each expert is calibrated on
the tokens that are routed to this expert. The weights are views of the fused parameters, so nothing is
copied.
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
    """The matrices of a fused mixture-of-experts module, and functions that are needed to separate its
    experts.

    Attributes:
        weights: A dictionary from the name of a projection to its weights ``[experts, out, in]``. The last
            entry is the output projection of the experts.
        biases: A dictionary from the name of a projection to its biases ``[experts, out]``. The dictionary is
            empty if the projections have no biases.
        gate: A function that computes the input of the output projection from the outputs of the other
            projections.
        separate: A function that returns the module that replaces the mixture-of-experts module. None means
            `SeparateExperts`, which fits if ``forward`` of the mixture-of-experts module has the arguments of
            `SeparateExperts.forward`.
    """

    weights: dict[str, Tensor]
    biases: dict[str, Tensor]
    gate: Callable[[Sequence[Tensor]], Tensor]
    separate: Callable[[ExpertParts], SeparateExperts] | None = None


class Expert(nn.Module):
    """A module that contains the layers of one expert. It has no ``forward``.

    `SeparateExperts` calls these layers, and computes the activation function between them.
    """


class SeparateExperts(nn.Module):
    """A module that computes the same as a fused mixture-of-experts module, but calls one expert after
    another.

    The child modules are the experts. The name of a child is the number of the expert.

    Args:
        parts: The matrices of the fused module. The weights of the new layers share storage with them.

    Attributes:
        shows_all: Whether every expert runs on every token, so that calibration gets more inputs. The output
            of this module does not change.
        layer_names: Names of the layers of one expert. The last one is the output projection.
    """

    shows_all = False

    def __init__(self, parts: ExpertParts) -> None:
        super().__init__()
        self.layer_names = tuple(parts.weights)
        self._gate = parts.gate
        for index in range(parts.weights[self.layer_names[-1]].shape[0]):
            self.add_module(str(index), _expert(parts, index))

    # Models use different names for the last two arguments, but all models pass them in this order.
    def forward(self, hidden_states: Tensor, chosen: Tensor | None = None, weights: Tensor | None = None, **named: Any) -> Tensor:
        """Return for each token the weighted sum of the outputs of its experts.

        Args:
            hidden_states: Inputs with the shape ``[..., hidden]``. The last axis belongs to one token.
            chosen: Indices of the ``k`` experts of each token, with the shape ``[tokens, k]``. If there is no
                expert with an index, the index is ignored.
            weights: Router weights of these experts, with the shape ``[tokens, k]``.
            **named: Other names for two arguments: ``top_k_index`` or ``router_indices`` for ``chosen``, and
                ``top_k_weights`` or ``routing_weights`` for ``weights``.

        Raises:
            UnsupportedError: The model does not pass the indices and weights of the experts.
        """
        chosen = chosen if chosen is not None else named.get("top_k_index", named.get("router_indices"))
        weights = weights if weights is not None else named.get("top_k_weights", named.get("routing_weights"))
        if chosen is None or weights is None:
            raise UnsupportedError(
                f"this model calls its experts with {', '.join(named) or 'their input alone'}, but without the experts' indices and "
                "weights (top_k_index, top_k_weights), so the experts cannot run as separate layers. Exclude the experts from quantization"
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
        """Return the output of ``expert`` for the tokens ``x``.

        ``expert`` is a child of this module, and ``x`` has the shape ``[tokens, hidden]``.
        """
        *inputs, last = self.layer_names
        return getattr(expert, last)(self._gate([getattr(expert, name)(x) for name in inputs]))


def separated(parts: ExpertParts) -> SeparateExperts:
    """Return the module that replaces a fused mixture-of-experts module.

    Its ``forward`` accepts the same arguments as the ``forward`` of the fused module.
    """
    return (parts.separate or SeparateExperts)(parts)


@contextmanager
def showing_all(model: nn.Module, wanted: bool) -> Iterator[None]:
    """If ``wanted`` is true, run every expert of ``model`` on every token inside the ``with`` block."""
    mixtures = [m for m in model.modules() if isinstance(m, SeparateExperts)] if wanted else []
    for mixture in mixtures:
        mixture.shows_all = True
    try:
        yield
    finally:
        for mixture in mixtures:
            mixture.shows_all = False


def _expert(parts: ExpertParts, index: int) -> Expert:
    """Return the expert with the number ``index``. The weights of its layers share storage with the fused
    parameters."""
    expert = _bare(Expert)
    for name, weight in parts.weights.items():
        bias = parts.biases.get(name)
        expert._modules[name] = _linear(weight[index], None if bias is None else bias[index])
    return expert


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer that shares the storage of ``weight`` and ``bias``."""
    layer = _bare(nn.Linear)
    layer.out_features, layer.in_features = weight.shape
    layer._parameters["weight"] = nn.Parameter(weight.detach(), requires_grad=False)
    layer._parameters["bias"] = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
    return layer


# A mixture-of-experts model may have a hundred thousand layers. The constructor of nn.Linear would draw
# random weights, and the constructor of nn.Module would need more time than the rest of planning.
def _bare(kind: type[_M]) -> _M:
    """Return an instance of ``kind`` that has only the state that ``nn.Module.__init__`` sets."""
    module = kind.__new__(kind)
    module.__dict__.update({name: value.copy() if isinstance(value, dict | set) else value for name, value in _new_state().items()})
    return module


@cache
def _new_state() -> dict[str, Any]:
    """Return the attributes of a new ``nn.Module``."""
    return nn.Module().__dict__
