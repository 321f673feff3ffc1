"""Hidden states of a float checkpoint and its quantized model, compared block by block after a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import OutputError
from quark.calibration.batches import Call
from quark.calibration.forwards import conducts_forwards, current_forward, without_cache
from quark.calibration.lockstep import LockStep
from quark.calibration.model_error import DEPTH_CALLS, depth_figures
from quark.calibration.round_to_nearest import tensor_of
from quark.calibration.transform_validation import BlockSource
from quark.models.plan.decoder_blocks import Block, decoder_blocks
from quark.models.plan.family import architecture_of

__all__ = ["NOT_COMPARABLE", "hidden_errors"]

NOT_COMPARABLE = "The hidden states cannot be compared, since a transform, such as a rotation, changed their basis."
_SAME_BASIS = 0.5
"""Relative squared error at the first block above which the hidden states have another basis; random states
have 2.
"""


@conducts_forwards
def hidden_errors(source: BlockSource, float_model: nn.Module, quantized: nn.Module, calls: Sequence[Call]) -> dict[str, dict[str, Any]]:
    """Return the `depth_figures` of each block, by name; empty if they cannot be compared.

    Memory holds one float block and the whole quantized model.

    Args:
        source: Source of the tensors of ``float_model``.
        float_model: The float model on the meta device, prepared with the source.
        quantized: The quantized model, in memory.
        calls: Samples; the first `DEPTH_CALLS` are used.
    """
    blocks = decoder_blocks(float_model, architecture_of(float_model))
    others = [Block(b.name, quantized.get_submodule(b.name)) for b in blocks]
    used = list(calls)[:DEPTH_CALLS]
    figures: dict[str, dict[str, Any]] = {}
    source.load(None)
    with ExitStack() as stack:
        sides = [stack.enter_context(_stepping(model, parts, used)) for model, parts in ((float_model, blocks), (quantized, others))]
        for i, block in enumerate(blocks):
            source.load(block)
            references, outputs = (side.passed(i) for side in sides)
            source.release(block)
            if i == 0 and _error(*(side.entered for side in sides)) > _SAME_BASIS:
                return {}
            errors = [OutputError.of(outputs[n], references[n]) for n in references if n in outputs]
            figures[block.name] = depth_figures(errors)
    return {name: row for name, row in figures.items() if row}


@attrs.define(eq=False)
class _Side:
    """The forwards of one of the two models.

    Attributes:
        steps: The forwards.
        blocks: Blocks of the model.
        entered: Input of the first block, by call.
    """

    steps: LockStep
    blocks: Sequence[Block]
    entered: dict[int, Tensor] = attrs.field(factory=dict)

    @torch.no_grad()
    def passed(self, index: int) -> dict[int, Tensor]:
        """Run all forwards through a block, and return the hidden states after it, by call."""
        outputs: dict[int, Tensor] = {}

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            forward = current_forward()
            assert forward is not None
            outputs[forward.number] = tensor_of(output).flatten(0, -2)
            if index == 0:
                self.entered[forward.number] = (args[0] if args else kwargs["hidden_states"]).flatten(0, -2)

        handle = self.blocks[index].module.register_forward_hook(keep, with_kwargs=True, prepend=True)  # before the forward waits there
        try:
            self.steps.advance(index)
        finally:
            handle.remove()
        return outputs


@contextmanager
def _stepping(model: nn.Module, blocks: Sequence[Block], calls: Sequence[Call]) -> Iterator[_Side]:
    with without_cache(model), LockStep(model, [b.module for b in blocks], calls, to_the_end=False) as steps:
        steps.advance(-1)
        yield _Side(steps, blocks)


def _error(entered: dict[int, Tensor], other: dict[int, Tensor]) -> float:
    errors = [OutputError.of(other[n], entered[n]) for n in entered if n in other]
    return float(depth_figures(errors).get("relative_error", 0.0))
