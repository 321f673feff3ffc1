"""Forward passes that replace layers and hold one block in memory, and layers in a candidate's scheme."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import RoundingTask, RoundToNearest
from quark.calibration.batches import Call
from quark.calibration.forwards import conducts_forwards, current_forward, replaced_forward, without_cache
from quark.calibration.lockstep import LockStep
from quark.models.layers import QuantizedLayer, quantized_class
from quark.models.plan.decoder_blocks import Block
from quark.numbers import quantizer_for
from quark_workbench.mixed_precision import Candidate, LayerGroup, SelectionProblem

__all__ = ["BlockForms", "QuantizedForm", "Replacement", "quantizing", "streamed"]

Replacement = Callable[[str, nn.Module, Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""A function that replaces a layer's forward function.

Its arguments are the layer's full name, the layer, the layer's own forward function, the input, and further
arguments.
"""


@conducts_forwards
def streamed(
    problem: SelectionProblem, calls: Sequence[Call], layers: Sequence[str], replacement: Replacement, *, to_the_end: bool
) -> None:
    """Run forward passes in which ``replacement`` replaces the forward functions of some layers.

    The model does not change.

    Args:
        problem: The selection problem, which has the model and the source of its tensors.
        calls: The inputs of the forward passes.
        layers: Full names of the layers.
        replacement: Function that replaces the ``forward`` method of each layer.
        to_the_end: Whether to compute the output head too.
    """
    problem.source.load(None)
    blocks = problem.blocks
    with without_cache(problem.model), LockStep(problem.model, [b.module for b in blocks], calls, to_the_end=to_the_end) as steps:
        steps.advance(-1)
        for i, block in enumerate(problem.events.blocks(blocks)):
            problem.source.load(block)
            inside = {name: problem.model.get_submodule(name) for name in layers if block.owns(name)}
            with _replaced(inside, replacement):
                steps.at(i).enter()
            problem.source.release(block)


@contextmanager
def _replaced(layers: Mapping[str, nn.Module], replacement: Replacement) -> Iterator[None]:
    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.enter_context(replaced_forward(layer, _standing_in(name, layer, replacement)))
        yield


def _standing_in(name: str, layer: nn.Module, replacement: Replacement) -> Callable[..., Any]:
    plain: Any = layer.forward

    def forward(x: Any, *args: Any, **kwargs: Any) -> Any:
        if current_forward() is None:
            return plain(x, *args, **kwargs)
        return replacement(name, layer, plain, x, args, kwargs)

    return forward


def quantizing(problem: SelectionProblem, group: LayerGroup) -> list[Candidate]:
    """Return the candidates that fit all layers of a group and quantize the weights of these layers."""
    fitting = [problem.candidates[name] for name in problem.sizes[group.name]]
    return [candidate for candidate in fitting if not candidate.is_float]


class QuantizedForm:
    """A layer in the scheme of a candidate.

    The weight is rounded to nearest. Scales of the input are computed from each input.

    Args:
        name: Full name of the layer.
        layer: The float layer, which does not change.
        candidate: A candidate that quantizes weights.
    """

    def __init__(self, name: str, layer: nn.Module, candidate: Candidate) -> None:
        spec = candidate.config.input_tensors
        self._input = None if spec is None else quantizer_for(spec, activation=True)
        config = attrs.evolve(candidate.config.copied(), input_tensors=None, output_tensors=None)
        self._layer = quantized_class(layer).from_float(layer, config)
        RoundToNearest().round(RoundingTask({name: self._layer}))

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's output for the input ``[…, K]``."""
        rounded = x if self._input is None else self._input.fake_quantize(x.contiguous())
        output: Tensor = QuantizedLayer.forward(self._layer, rounded)
        return output


class BlockForms:
    """The layers of one block at a time in the schemes of the candidates. A layer is created on first use.

    Args:
        problem: The selection problem, which has the blocks.
    """

    def __init__(self, problem: SelectionProblem) -> None:
        self._blocks = problem.blocks
        self._block: Block | None = None
        self._forms: dict[tuple[str, str], QuantizedForm] = {}

    def of(self, name: str, layer: nn.Module, candidate: Candidate) -> QuantizedForm:
        """Return a layer in the scheme of a candidate. The layers of other blocks are released."""
        if self._block is None or not self._block.owns(name):
            self._block = next(block for block in self._blocks if block.owns(name))
            self._forms.clear()
        if (name, candidate.name) not in self._forms:
            self._forms[name, candidate.name] = QuantizedForm(name, layer, candidate)
        return self._forms[name, candidate.name]
