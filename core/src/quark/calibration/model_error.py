"""ModelError: the error of the last block's output, with the rounding of the run and with round-to-nearest.

Layers are validated one by one, but their errors add up: codes that are better in every layer can be worse in
the model. The first tokens of the first calibration sample show whether they are. Two short forwards, beside
the forwards of the run, pass every block before it is changed: one through the float block, one with its
layers rounded to nearest. The third output is that of the run's own forward for these tokens: in a causal
model, it does not depend on later tokens.

With few tokens, these are among the tokens that are held out for roundings (`quark.calibration.held_out`).
With many, they are in the statistics, like the held-out tokens: codes then hardly overfit single tokens.

DepthError: the error of the hidden states after each block, measured if calibration has a float forward
beside the quantized one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import attrs
import torch
from greenlet import GreenletExit
from torch import Tensor, nn

from quark.algorithms import OutputError
from quark.algorithms.validation import validated
from quark.calibration.batches import Call, ids_of
from quark.calibration.figures import decibels
from quark.calibration.forwards import Forward, current_forward
from quark.calibration.lockstep import BlockRun
from quark.calibration.round_to_nearest import as_rounded, configs_of, tensor_of
from quark.models.plan.decoder_blocks import Block
from quark.models.plan.plan_row import PlanRow
from quark.models.plan.quant_plan import has_static_scale

ONE_IN = 64
"""One in this many calibration tokens is compared: two forwards of these cost 3 % of one forward of all
tokens.
"""
MOST_TOKENS = 512
"""Maximum number of compared tokens; more would hardly reduce the noise."""
FEWEST_TOKENS = 8
"""Minimum number of compared tokens; with fewer, the comparison would be noise."""


@attrs.define(eq=False, slots=False)
class ModelError:
    """Compares the outputs of the last block, on the first tokens of the first call.

    Attributes:
        calls: Calls of the two short forwards; none if nothing is compared.
    """

    calls: Sequence[Call] = ()
    _last: nn.Module | None = None
    _outputs: list[Tensor] = attrs.field(factory=list)
    _own: Tensor | None = None

    @classmethod
    def of(cls, model: nn.Module, blocks: Sequence[Block], data: Sequence[Call], rows: Sequence[PlanRow]) -> Self:
        """Return the comparison of a run; it compares nothing if that is not possible.

        It is for causal models that are called with only token ids, and for schemes that quantize no outputs
        and have no static scales. Few tokens have a smaller range than all tokens, so rounding to nearest
        would look better than it is.

        Args:
            model: The model.
            blocks: Its blocks.
            data: The calls of all ranks.
            rows: The quantized layers.
        """
        generates: Any = getattr(model, "can_generate", None)
        looks_back = generates is not None and generates() and not getattr(model.config, "is_encoder_decoder", False)
        ids = ids_of(data[0]) if looks_back else None
        configs = [row.quantized_to for row in rows]
        if ids is None or any(has_static_scale(config.input_tensors) or config.output_tensors is not None for config in configs):
            return cls()
        tokens = sum(len(i.flatten()) for call in data if (i := ids_of(call)) is not None)
        prefix = ids[:1, : min(tokens // ONE_IN, MOST_TOKENS)]
        return cls([Call((prefix,))] * 2, blocks[-1].module) if prefix.shape[1] >= FEWEST_TOKENS else cls()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the output of the last block for the first call, while the body runs."""
        if self._last is None:
            yield
            return
        handle = self._last.register_forward_hook(self._keep_own)
        try:
            yield
        finally:
            handle.remove()

    def pass_block(self, block_run: BlockRun | None, block: Block, rows: Sequence[PlanRow]) -> None:
        """Lead both short forwards through a float block, and end them after the last block."""
        probes = () if block_run is None else block_run.probes
        if block_run is None or not probes:
            return
        keep = self._keep if block.module is self._last else None
        block_run.release(probes[:1], keep)
        with as_rounded(block.module, configs_of(block.name, [row for row in rows if not row.is_kept])):
            block_run.release(probes[1:], keep)

    def figures(self) -> dict[str, Any]:
        """Return the relative squared errors of the last block's output, means over tokens.

        Empty if nothing was compared.

        Returns:
            ``error`` as the run rounds, ``nearest_error`` with all layers rounded to nearest, the
                ``standard_error`` of their difference, and ``tokens``.
        """
        if len(self._outputs) < 2 or self._own is None:
            return {}
        reference, nearest = self._outputs
        result = validated([OutputError.of(nearest, reference)], [OutputError.of(self._own[: len(reference)], reference)]).metrics()
        names = {"error": "error_after", "nearest_error": "error_before", "standard_error": "standard_error", "tokens": "tokens"}
        return {name: result[key] for name, key in names.items()}

    def _keep(self, _: Forward, output: Any) -> None:
        self._outputs.append(tensor_of(output)[0].clone())
        raise GreenletExit  # nothing after the last block is compared

    def _keep_own(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        forward = current_forward()
        if forward is not None and forward.number == 0 and not forward.is_float:
            self._own = tensor_of(output)[0, :MOST_TOKENS].clone()  # also in a rehearsal: the last one counts


DEPTH_CALLS = 4
"""Calibration samples whose hidden states are compared: a few thousand tokens determine the mean to about a
tenth of a dB.
"""


class DepthError:
    """Compares the hidden states of float and quantized forwards of the same calls, block by block.

    The hidden states of the first `DEPTH_CALLS` calls are held from when one of the two forwards leaves a
    block until the other does.
    """

    def __init__(self) -> None:
        self._left: dict[tuple[str, int, bool], Tensor] = {}
        self._errors: dict[str, list[OutputError]] = {}

    @contextmanager
    def watching(self, blocks: Sequence[Block]) -> Iterator[None]:
        """Compare the outputs of the blocks while the body runs."""
        with ExitStack() as stack:
            for block in blocks:
                stack.callback(block.module.register_forward_hook(self._hook(block.name)).remove)
            yield

    def of(self, block: str) -> dict[str, Any]:
        """Return a block's error, as `depth_figures` does, and forget it; empty if nothing was compared."""
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
    """Return the mean relative squared error of some tokens' hidden states, as such and in dB.

    The second is the signal-to-noise ratio. Empty without tokens.

    Returns:
        ``relative_error``: ‖h − ĥ‖² ÷ ‖h‖² of each token, averaged, so that a token with massive activations
            counts like any other;
        ``snr_db``: −10 log10 of that, None without error; ``tokens``.
    """
    relative = torch.cat([error.relative for error in errors]) if errors else torch.zeros(0, dtype=torch.float32)
    if not len(relative):
        return {}
    mean = float(relative.mean())
    return {"relative_error": mean, "snr_db": decibels(1.0, mean), "tokens": len(relative)}
