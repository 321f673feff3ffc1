"""Prediction, with one backward pass, of the KL divergence that errors in a layer's outputs cause.

If quantization changes the output of one layer at each token t by ``δy_t``, then::

    KL(float ‖ quantized) ≈ ½ E (Σ_t g_tᵀ δy_t)² ≈ ½ Σ_t E (g_tᵀ δy_t)²

Here ``g_t`` is the gradient, with respect to the output, of the log-likelihood of next tokens that the model
itself draws. The second step assumes that errors of different tokens are independent. Errors are weighted by
the gradient of their own token, since a few tokens have the largest outputs but almost no gradient. Source:
Martens, "New insights and perspectives on the natural gradient method", 2020, section 5, for the Fisher
information as the curvature of the divergence.

In an encoder, the positions are not the predicted tokens. Each position affects all predicted tokens, so the
errors of all positions add up. Therefore only the first step is used if the output of a layer has another
number of positions than the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.calibration.batches import Call
from quark.calibration.forwards import without_cache
from quark.runs.memory import SHARE, free_bytes
from quark_workbench.mixed_precision import Candidate, SelectionProblem
from quark_workbench.mixed_precision.by_sensitivity.replaced_layers import QuantizedForm, quantizing

__all__ = ["divergences"]


class _Forms:
    """The layers of the model in the schemes of the candidates.

    A layer is kept for the next batches if ``room`` suffices. Other layers are rounded again for each batch.

    Args:
        room: Bytes of memory for the rounded weights of kept layers; None keeps all layers.
    """

    def __init__(self, room: int | None) -> None:
        self._room = room
        self._forms: dict[tuple[str, str], QuantizedForm] = {}

    def of(self, name: str, module: nn.Module, candidate: Candidate) -> QuantizedForm:
        """Return a layer in the scheme of a candidate."""
        form = self._forms.get((name, candidate.name))
        if form is None:
            form = QuantizedForm(name, module, candidate)
            size = sum(p.nbytes for p in module.parameters())
            if self._room is None or size <= self._room:
                self._forms[name, candidate.name] = form
                self._room = None if self._room is None else self._room - size
        return form


@attrs.define(eq=False)
class _Errors:
    """Sums of squared errors over forward passes.

    The errors of a layer are added in the backward pass, when the gradient of its output is computed.

    Attributes:
        offered: Dictionary from full name of layer to the candidates that can quantize the layer.
        forms: The layers in the schemes of the candidates.
        squares: For each layer, a dictionary from candidate to the sum so far. The sum is
            ``Σ_t (g_tᵀ δy_t)²``. If the output of a layer has another number of positions than the logits, it
            is the sum of ``(Σ_t g_tᵀ δy_t)²`` over the calls.
        tokens: Number of tokens that the current call predicts.
    """

    offered: Mapping[str, Sequence[Candidate]]
    forms: _Forms
    squares: dict[str, dict[str, float]]
    tokens: int = 0

    def hook(self, name: str) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        """Return a forward hook that adds the errors of a layer when the gradient of its output is computed.

        If no autograd graph leads to the output yet, the hook starts a graph at the output.
        """

        def watch(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            x, y = args[0].detach(), output.detach()
            if not output.requires_grad:
                output = output.detach().requires_grad_(True).clone()  # code that follows may change a clone in place, but no leaf
            if output.requires_grad:  # without gradients, nothing that follows depends on the layer
                output.register_hook(lambda gradient: self._add(name, module, x, y, gradient))
            return output

        return watch

    @torch.no_grad()
    def _add(self, name: str, module: nn.Module, x: Tensor, y: Tensor, gradient: Tensor) -> None:
        """Add the errors of a layer in one batch.

        ``x [..., K]`` is the input, ``y [..., N]`` the output and ``gradient [..., N]`` the gradient of the
        output.
        """
        x, y, gradient = x.flatten(0, -2), y.flatten(0, -2).float(), gradient.flatten(0, -2).float()
        for candidate in self.offered[name]:
            error = self.forms.of(name, module, candidate)(x).float() - y
            effects = (gradient * error).sum(-1)
            self.squares[name][candidate.name] += float((effects if len(y) == self.tokens else effects.sum()).square().sum())


def divergences(problem: SelectionProblem, calls: Sequence[Call], seed: int = 0, room: int | None = None) -> dict[str, dict[str, float]]:
    """Return the predicted KL divergence, in nats per token, of each layer in each candidate's scheme.

    The result is a dictionary from full name of layer to a dictionary from candidate to divergence. The whole
    model and the activations of one batch must fit in memory. The model does not change.

    Args:
        problem: The selection problem, which has the model.
        calls: The batches of calibration data.
        seed: Seed for the random choice of next tokens.
        room: Bytes of memory for rounded weights that are kept for the next batches; None for a fixed share
            of the free memory. Other layers are rounded again for each batch.
    """
    problem.source.load(None)
    for block in problem.blocks:
        problem.source.load(block)
    offered = {layer: quantizing(problem, group) for group in problem.groups for layer in group.layers}
    squares = {layer: {one.name: 0.0 for one in own} for layer, own in offered.items()}
    if room is None and (free := free_bytes(next(problem.model.parameters()).device)) is not None:
        room = int(SHARE * free)
    errors = _Errors(offered, _Forms(room), squares)
    generator, tokens = torch.Generator().manual_seed(seed), 0
    with _without_gradients(problem.model), without_cache(problem.model), ExitStack() as stack:
        for name in offered:
            stack.callback(problem.model.get_submodule(name).register_forward_hook(errors.hook(name)).remove)
        for call in problem.events.batches(calls, of=calls):
            tokens += _backward(problem.model, call, generator, errors)
    for block in problem.blocks:
        problem.source.release(block)
    return {layer: {name: value / (2 * max(1, tokens)) for name, value in own.items()} for layer, own in squares.items()}


def _backward(model: nn.Module, call: Call, generator: torch.Generator, errors: _Errors) -> int:
    """Draw random next tokens in a forward pass, and run a backward pass from their log-likelihood.

    Return the number of tokens.
    """
    with torch.enable_grad():
        output = call.run(model)
        log_p = torch.log_softmax(getattr(output, "logits", output).flatten(0, -2).float(), -1)  # [tokens, V]
        errors.tokens = len(log_p)
        drawn = torch.multinomial(log_p.detach().exp().cpu(), 1, generator=generator).to(log_p.device)
        log_p.gather(1, drawn).sum().backward()
    return len(log_p)


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """Compute no gradients of parameters in the body of the ``with`` statement."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
