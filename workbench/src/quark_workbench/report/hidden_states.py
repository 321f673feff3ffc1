"""Comparison of the hidden states of float and quantized model after each block, during or after a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import OutputError
from quark.base.scalars import decibels
from quark.calibration.batches import Call
from quark.calibration.forwards import conducts_forwards, current_forward, without_cache
from quark.calibration.lockstep import LockStep
from quark.calibration.round_to_nearest import tensor_of
from quark.calibration.transform_validation import BlockSource
from quark.models.plan.decoder_blocks import Block, decoder_blocks
from quark.models.plan.family import architecture_of

__all__ = ["NOT_COMPARABLE", "hidden_errors"]

NOT_COMPARABLE = "A transform, such as a rotation, changed the basis of the hidden states, so they cannot be compared."
_SAME_BASIS = 0.5
"""If the relative squared error at the first block is larger, the hidden states have another basis.

Random states have 2.
"""


@conducts_forwards
def hidden_errors(source: BlockSource, float_model: nn.Module, quantized: nn.Module, calls: Sequence[Call]) -> dict[str, dict[str, Any]]:
    """Return a dictionary from name of block to the `depth_figures` of the hidden states after the block.

    The result is empty if the models cannot be compared, because even the inputs of the first block differ.
    Memory holds one float block and the whole quantized model.

    Args:
        source: The object that loads the tensors of ``float_model``.
        float_model: The float model on the meta device, for which the source is prepared.
        quantized: The quantized model, in memory.
        calls: The samples. Only the first `DEPTH_CALLS` are used.
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
    """The forward passes of one of the two models.

    Attributes:
        steps: The forward passes, which run block by block.
        blocks: The decoder blocks of the model.
        entered: Dictionary from number of call to the input of the first block.
    """

    steps: LockStep
    blocks: Sequence[Block]
    entered: dict[int, Tensor] = attrs.field(factory=dict)

    @torch.no_grad()
    def passed(self, index: int) -> dict[int, Tensor]:
        """Run all forward passes through a block.

        Return a dictionary from number of call to the hidden states after the block.
        """
        outputs: dict[int, Tensor] = {}

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            forward = current_forward()
            assert forward is not None
            outputs[forward.number] = tensor_of(output).flatten(0, -2)
            if index == 0:
                self.entered[forward.number] = (args[0] if args else kwargs["hidden_states"]).flatten(0, -2)

        handle = self.blocks[index].module.register_forward_hook(keep, with_kwargs=True, prepend=True)  # before the waiting hook
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


DEPTH_CALLS = 4
"""Calibration samples whose hidden states are compared: a few thousand tokens determine the mean to about a
tenth of a dB.
"""


class DepthError:
    """Compares the hidden states of float and quantized forward passes on the same samples, block by block.

    When one of the two forward passes on a sample leaves a block, its hidden states are stored until the
    other one leaves the block. Only the first `DEPTH_CALLS` samples are compared.
    """

    def __init__(self) -> None:
        self._left: dict[tuple[str, int, bool], Tensor] = {}
        self._errors: dict[str, list[OutputError]] = {}

    @contextmanager
    def watching(self, blocks: Sequence[Block]) -> Iterator[None]:
        """Compare the outputs of the blocks in the body of the ``with`` statement."""
        with ExitStack() as stack:
            for block in blocks:
                stack.callback(block.module.register_forward_hook(self._hook(block.name)).remove)
            yield

    def of(self, block: str) -> dict[str, Any]:
        """Return the `depth_figures` of a block, and delete the errors of the block.

        Return ``{}`` if no hidden states were compared.
        """
        return depth_figures(self._errors.pop(block, []))

    def _hook(self, name: str) -> Any:
        def compare(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            forward = current_forward()
            if forward is None or forward.is_probe or forward.number >= DEPTH_CALLS:
                return
            hidden = tensor_of(output).flatten(0, -2)
            other = self._left.pop((name, forward.number, not forward.is_float), None)
            if other is None:
                self._left[name, forward.number, forward.is_float] = hidden
            else:
                pair = (other, hidden) if forward.is_float else (hidden, other)
                self._errors.setdefault(name, []).append(OutputError.of(*pair))

        return compare


def depth_figures(errors: Sequence[OutputError]) -> dict[str, Any]:
    """Return the mean relative squared error of hidden states, and the signal-to-noise ratio.

    The result is empty if there are no tokens.

    Returns:
        ``relative_error``: the mean over tokens of ‖h − ĥ‖² ÷ ‖h‖², for hidden states h of the float model
        and ĥ of the quantized model. The division lets tokens with massive activations count like others.
        ``snr_db``: the signal-to-noise ratio in dB, −10 log10 of ``relative_error``; None without an error.
        ``tokens``: the number of tokens.
    """
    relative = torch.cat([error.relative for error in errors]) if errors else torch.zeros(0, dtype=torch.float32)
    if not len(relative):
        return {}
    mean = float(relative.mean())
    return {"relative_error": mean, "snr_db": decibels(1.0, mean), "tokens": len(relative)}
