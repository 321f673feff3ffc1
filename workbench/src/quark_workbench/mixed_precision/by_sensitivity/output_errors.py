"""Output errors: for each layer and candidate, how far the quantized layer's outputs are from the float ones; one streamed forward.

The sum over tokens is ``Σ_t ‖y_t − ŷ_t‖² = tr(ΔW H ΔWᵀ)``, with ``H = Σ x xᵀ``, where inputs stay float. It
is taken from the outputs themselves, so that the error of quantized inputs, and its correlation with that of
the weights, are in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from quark.calibration.batches import Call
from quark.calibration.forwards import current_forward
from quark.calibration.pause_points import tokens_of
from quark.runs.memory import tokens_in
from quark_workbench.mixed_precision import Candidate, SelectionProblem
from quark_workbench.mixed_precision.by_sensitivity.quantized_form import QuantizedForm
from quark_workbench.mixed_precision.by_sensitivity.streaming import streamed

__all__ = ["output_errors"]

_TOKENS = 1024
"""Tokens whose outputs are computed at a time."""


def output_errors(problem: SelectionProblem, calls: Sequence[Call]) -> dict[str, dict[str, float]]:
    """Return the squared output error per token of the data, by full name of layer, then by candidate that quantizes it.

    The forward is that of the float model; one block of it is in memory at a time.

    Args:
        problem: Has the model; nothing in it is changed.
        calls: The batches.
    """
    offered = {
        layer: [problem.candidates[name] for name in problem.sizes[group.name]] for group in problem.groups for layer in group.layers
    }
    squares = {layer: {one.name: 0.0 for one in own if not one.is_float} for layer, own in offered.items()}
    block_of = {layer: block.name for block in problem.blocks for layer in offered if block.owns(layer)}
    forms: dict[str, dict[str, QuantizedForm]] = {}

    def replacement(name: str, layer: nn.Module, plain: Callable[..., Any], x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward: Any = current_forward()
        if name not in forms:
            for other in [other for other in forms if block_of[other] != block_of[name]]:
                del forms[other]  # of a block that is behind
            forms[name] = _forms(name, layer, offered[name])
        y = plain(x, *args, **kwargs)
        for part, wanted in zip(*(tokens_of(t, forward.call).split(_TOKENS) for t in (x, y)), strict=True):
            for one, form in forms[name].items():
                squares[name][one] += float((form(part) - wanted).float().square().sum())
        return y

    streamed(problem, calls, list(offered), replacement, to_the_end=False)
    tokens = max(1, tokens_in(calls))
    return {layer: {name: value / tokens for name, value in own.items()} for layer, own in squares.items()}


def _forms(name: str, layer: nn.Module, candidates: Sequence[Candidate]) -> dict[str, QuantizedForm]:
    return {one.name: QuantizedForm(name, layer, one) for one in candidates if not one.is_float}
