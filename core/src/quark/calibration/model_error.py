"""ModelError: the error of the last block's output, with the rounding of the run and with round-to-nearest.

Layers are validated one by one, but their errors add up: codes that are better in every layer can be worse in
the model. The error on the first tokens of the first calibration sample shows that. Two short forwards,
beside the forwards of the run, pass every block before it is changed: one through the float block, one with
its layers rounded to nearest. The third output comes from the run's own forward: in a causal model, the
output of these tokens does not depend on later tokens.

If calibration has few tokens, the compared tokens are held out for roundings (`quark.calibration.held_out`).
If it has many, statistics contain the compared tokens, like all held-out tokens: codes then hardly overfit
single tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import attrs
from greenlet import GreenletExit
from torch import Tensor, nn

from quark.algorithms import OutputError, validated
from quark.calibration.batches import Call, ids_of
from quark.calibration.forwards import Forward, current_forward
from quark.calibration.lockstep import BlockRun
from quark.calibration.round_to_nearest import as_rounded, configs_of, tensor_of
from quark.models.plan.decoder_blocks import Block
from quark.models.plan.plan_row import PlanRow
from quark.models.plan.quant_plan import has_static_scale

ONE_IN = 64
"""One in this many calibration tokens is compared: two forwards of the compared tokens cost 3 % of one
forward of all tokens.
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

        The model must be causal and called with only token ids. The scheme must quantize no outputs and have
        no static scales: with these, rounding to nearest would look better than it is, because few tokens
        have a smaller range than all.

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
        """Lead one short forward through a float block, the other through the block rounded to nearest.

        Both end after the last block.
        """
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
            self._own = tensor_of(output)[0, :MOST_TOKENS].clone()  # a rehearsal comes here too: the last output counts
