"""ModelError: the error of the last block's output. It is measured for the rounding of the run, and for
round-to-nearest.

Layers are validated one by one, but their errors accumulate, so codes that are better in every layer can be
worse in the whole model. This module detects such a case. It compares outputs of the last block on the first
tokens of the first calibration sample. Three outputs are needed. Two short forward passes run through every
block before the block is changed: one through the float block, the other through the block with its layers
rounded to nearest. The third output comes from a forward pass of the run. The model must be causal, so that
the output of the first tokens does not depend on later tokens.

If calibration has few tokens, the compared tokens are held out for roundings (`quark.calibration.held_out`).
If it has many tokens, the statistics contain all held-out tokens, and so also the compared tokens. With so
many tokens, codes hardly overfit single tokens.
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
"""One in this many calibration tokens is compared. The two forward passes of the compared tokens then cost 3
% of one forward pass of all tokens.
"""
MOST_TOKENS = 512
"""Maximum number of compared tokens. More tokens would hardly reduce the noise."""
FEWEST_TOKENS = 8
"""Minimum number of compared tokens. With fewer tokens, the result would be dominated by noise."""


@attrs.define(eq=False, slots=False)
class ModelError:
    """Compares outputs of the last block on the first tokens of the first call.

    Attributes:
        calls: Calls of the two short forward passes. Empty if nothing is compared.
    """

    calls: Sequence[Call] = ()
    _last: nn.Module | None = None
    _outputs: list[Tensor] = attrs.field(factory=list)
    _own: Tensor | None = None

    @classmethod
    def of(cls, model: nn.Module, blocks: Sequence[Block], data: Sequence[Call], rows: Sequence[PlanRow]) -> Self:
        """Return the `ModelError` of a run. If a comparison is not possible, the result compares nothing.

        A comparison is possible if the model is causal and is called with token ids alone. In addition, the
        scheme must not quantize outputs and must not have static scales. With static scales, round-to-nearest
        would look better than it is, because its scales would be computed from a few tokens, which have a
        smaller range than all tokens.

        Args:
            model: The model.
            blocks: The blocks of the model.
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
        """Store the last block's output for the first call while the body of the ``with`` statement runs.

        Nothing is stored if the body does not compute this output.
        """
        if self._last is None:
            yield
            return
        handle = self._last.register_forward_hook(self._keep_own)
        try:
            yield
        finally:
            handle.remove()

    def pass_block(self, block_run: BlockRun | None, block: Block, rows: Sequence[PlanRow]) -> None:
        """Run one short forward pass through the float block, and the other through the block rounded to
        nearest.

        Both forward passes end after the last block.
        """
        probes = () if block_run is None else block_run.probes
        if block_run is None or not probes:
            return
        keep = self._keep if block.module is self._last else None
        block_run.release(probes[:1], keep)
        with as_rounded(block.module, configs_of(block.name, [row for row in rows if not row.is_kept])):
            block_run.release(probes[1:], keep)

    def figures(self) -> dict[str, Any]:
        """Return the relative squared errors of the last block's output, averaged over tokens.

        The result is empty if nothing was compared.

        Returns: A dictionary. ``error`` is the error with the run's rounding. ``nearest_error`` is the error
        with all layers rounded to nearest. ``standard_error`` is the standard error of the difference of both
        errors. ``tokens`` is the number of compared tokens.
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
            self._own = tensor_of(output)[0, :MOST_TOKENS].clone()  # a rehearsal stores its output, too; the last one remains
