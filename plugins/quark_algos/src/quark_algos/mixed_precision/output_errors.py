"""Output errors: for each layer and candidate, how far the quantized layer's outputs are from the float ones; one streamed forward.

The sum over tokens is ``Σ_t ‖y_t − ŷ_t‖²_S = tr(S ΔW H ΔWᵀ)``, with ``H = Σ x xᵀ``, where inputs stay float. It is taken from the outputs
themselves, so that the error of quantized inputs, and its correlation with that of the weights, are in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.calibration.batches import Call
from quark.calibration.lockstep import current_forward
from quark.calibration.pause_points import tokens_of
from quark.selection import Candidate, SelectionProblem
from quark_algos.mixed_precision.streaming import QuantizedForm, streamed

__all__ = ["OutputErrors", "output_errors"]

_TOKENS = 1024
"""Tokens whose outputs are computed at a time."""


@attrs.define(eq=False)
class OutputErrors:
    """Errors of one layer.

    Attributes:
        squares: Sum over tokens of the squared error of each output, ``[N]``, by candidate; float layers have none.
        outputs: Sum over tokens and outputs of the squared float outputs.
        tokens: The number of tokens.
    """

    squares: dict[str, Tensor] = attrs.field(factory=dict)
    outputs: float = 0.0
    tokens: int = 0

    @torch.no_grad()
    def add(self, x: Tensor, plain: Callable[..., Any], forms: Mapping[str, QuantizedForm]) -> None:
        """Add inputs ``[tokens, K]``: the outputs of the float layer, ``plain``, against those of its forms."""
        for part in x.split(_TOKENS):
            y = plain(part).float()
            self.outputs += float(y.square().sum())
            self.tokens += len(part)
            for name, form in forms.items():
                self.squares[name] = self.squares.get(name, 0) + (form(part).float() - y).square().sum(0)


def output_errors(problem: SelectionProblem, calls: Sequence[Call]) -> dict[str, OutputErrors]:
    """Return the errors by full name of layer, along a float forward; one block of the model is in memory at a time.

    Args:
        problem: Has the model; nothing in it is changed.
        calls: The batches.
    """
    offered = {
        layer: [problem.candidates[name] for name in problem.sizes[group.name]] for group in problem.groups for layer in group.layers
    }
    errors = {layer: OutputErrors() for layer in offered}
    block_of = {layer: block.name for block in problem.blocks for layer in offered if block.owns(layer)}
    forms: dict[str, dict[str, QuantizedForm]] = {}

    def replacement(name: str, layer: nn.Module, plain: Callable[..., Any], x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward: Any = current_forward()
        if name not in forms:
            for other in [other for other in forms if block_of[other] != block_of[name]]:
                del forms[other]  # of a block that is behind
            forms[name] = _forms(name, layer, offered[name])
        errors[name].add(tokens_of(x, forward.call), plain, forms[name])
        return plain(x, *args, **kwargs)

    streamed(problem, calls, list(offered), replacement, to_the_end=False)
    return errors


def _forms(name: str, layer: nn.Module, candidates: Sequence[Candidate]) -> dict[str, QuantizedForm]:
    return {one.name: QuantizedForm(name, layer, one) for one in candidates if not one.is_float}
