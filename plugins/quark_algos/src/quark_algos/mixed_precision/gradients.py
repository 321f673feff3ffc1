"""Output gradients: how much the log-likelihood of the model depends on each output of each layer; one backward pass for each batch.

For small errors ``δy_t`` of the outputs of a layer at tokens t, ``KL ≈ ½ Σ_t E (g_tᵀ δy_t)²``, with ``g_t`` the gradient by the output of
the log-likelihood of next tokens that the model itself draws: their second moment is the Fisher information. Kept of it is what a factored
form needs, ``E g_to² ≈ n_t S_o / Σ S``: S by output channel, n by token. Source: Martens, Grosse, "Optimizing Neural Networks with
Kronecker-factored Approximate Curvature", 2015, section 3; here the diagonal of the output factor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.calibration.batches import Call
from quark.calibration.lockstep import without_cache
from quark.calibration.pause_points import tokens_of
from quark.errors import UnsupportedError
from quark.selection import SelectionProblem

__all__ = ["OutputGradients", "output_gradients"]


@attrs.define(eq=False)
class OutputGradients:
    """Squared gradients of the log-likelihood by the outputs of one layer, summed.

    Attributes:
        channels: Over tokens, ``[N]``, float32.
        tokens: The number of tokens.
    """

    channels: Tensor | float = 0.0
    tokens: int = 0

    def add(self, gradient: Tensor) -> None:
        """Add the gradient ``[tokens, N]``."""
        self.channels = self.channels + gradient.float().square().sum(0)
        self.tokens += len(gradient)


def output_gradients(problem: SelectionProblem, calls: Sequence[Call], seed: int = 0) -> dict[str, OutputGradients]:
    """Return the gradients by full name of layer. All tensors of the model are in memory while it works, and one batch's activations.

    Args:
        problem: Has the model; nothing in it is changed.
        calls: The batches, one forward and one backward pass for each.
        seed: Of the tokens that are drawn.

    Raises:
        UnsupportedError: The model has no input embeddings, from which a backward pass begins.
    """
    problem.source.load(None)
    for block in problem.blocks:
        problem.source.load(block)
    gradients = {layer: OutputGradients() for group in problem.groups for layer in group.layers}
    embeddings = _embeddings(problem.model)
    generator = torch.Generator().manual_seed(seed)
    needed = [p for p in problem.model.parameters() if p.requires_grad]
    handles = [embeddings.register_forward_hook(_begins_graph)]
    current: list[Call] = []
    handles += [problem.model.get_submodule(n).register_forward_hook(_watching(own, current)) for n, own in gradients.items()]
    try:
        for parameter in needed:
            parameter.requires_grad_(False)
        with without_cache(problem.model), torch.enable_grad():
            for call in calls:
                current[:] = [call]
                _backward(problem.model, call, generator)
    finally:
        for handle in handles:
            handle.remove()
        for parameter in needed:
            parameter.requires_grad_(True)
    for block in problem.blocks:
        problem.source.release(block)
    return gradients


def _embeddings(model: nn.Module) -> nn.Module:
    get: Any = getattr(model, "get_input_embeddings", None)
    embeddings = get() if get is not None else None
    if not isinstance(embeddings, nn.Module):
        raise UnsupportedError(
            f"a {type(model).__name__} has no input embeddings (get_input_embeddings), from which a backward pass begins: choose another "
            "sensitivity, such as output"
        )
    return embeddings


def _begins_graph(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Let the graph of the backward pass begin at the embeddings, where no parameter needs a gradient."""
    return output.detach().requires_grad_(True)


def _watching(own: OutputGradients, current: Sequence[Call]) -> Callable[[nn.Module, Any, Tensor], None]:
    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: own.add(tokens_of(gradient, current[0])))

    return watch


def _backward(model: nn.Module, call: Call, generator: torch.Generator) -> None:
    """Run a forward, draw a next token for each position, and go back from their log-likelihood."""
    output = call.run(model)
    log_p = torch.log_softmax(tokens_of(getattr(output, "logits", output), call).float(), -1)  # [tokens, V]
    drawn = torch.multinomial(log_p.detach().exp().cpu(), 1, generator=generator).to(log_p.device)
    log_p.gather(1, drawn).sum().backward()
