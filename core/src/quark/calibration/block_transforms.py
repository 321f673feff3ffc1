"""Let transforms change a block before it is rounded: a float pass shows them its inputs, and held-out tokens what they have done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from quark.algorithms import BlockContext, OutputError, Statistic, Transform
from quark.calibration.lockstep import ENTRY, Forward, LockStep, current_forward
from quark.calibration.output_error import as_rounded, configs_of, tensor_of
from quark.calibration.pause_points import tokens_of
from quark.config.architecture import Architecture
from quark.planning.decoder_blocks import Block
from quark.planning.plan import PlanRow


class BlockTransforms:
    """Applies transforms to one block.

    Args:
        run: Forwards, of which all wait at the block's entry; they do so again when this has worked. None where no transform needs any.
        index: Of the block.
        block: The block.
        rows: What its layers are going to be.
        transforms: In order.
        architecture: Facts about the family.
        model_config: As `quark.algorithms.BlockContext.model_config`.

    Attributes:
        metrics: What the transforms have to say.
        idle: Places of those transforms that have left the block as it was.
    """

    def __init__(
        self,
        run: LockStep | None,
        index: int,
        block: Block,
        rows: Sequence[PlanRow],
        transforms: Sequence[Transform],
        architecture: Architecture,
        model_config: Any = None,
    ) -> None:
        self._run = run
        self._index = index
        self._block = block
        self._transforms = transforms
        self._architecture = architecture
        self._model_config = model_config
        self._configs = configs_of(block.name, rows)
        self._kinds = tuple(dict.fromkeys(kind for t in transforms for kind in t.needs))
        self._statistics: dict[str, dict[type[Statistic], Statistic]] = {}
        self._last: tuple[Forward | None, str, Tensor | None] = (None, "", None)
        # Where nothing can be held out, all tokens are for both: that is better than not to look.
        is_divided = run is not None and run.holds_out
        self._for_statistics: bool | None = False if is_divided else None
        self._for_validation: bool | None = True if is_divided else None
        self._references: dict[Forward, Tensor] = {}
        self._tried: list[Tensor] | None = None
        self.metrics: dict[str, dict[str, Any]] = {}
        self.idle: list[int] = []

    def work(self) -> None:
        """Apply each transform in turn; those that need statistics are shown what the ones before them have made of the block."""
        first = next((i for i, t in enumerate(self._transforms) if t.needs), len(self._transforms))
        self._apply(range(first))
        if self._run is not None and self._kinds:
            self._show(self._run)
        self._apply(range(first, len(self._transforms)))
        self._references = {}

    def _apply(self, places: Sequence[int]) -> None:
        context = BlockContext(
            self._block.name,
            self._block.module,
            self._architecture,
            self._configs,
            self._statistics,
            self._output_error if self._references else None,
            self._output if self._references else None,
            self._model_config,
        )
        for place in places:
            said = self._transforms[place].apply(context)
            for name, metrics in said.items():
                self.metrics.setdefault(name, {}).update(metrics)
            if not said.get(self._block.name, {}).get("applied", True):
                self.idle.append(place)

    def _show(self, run: LockStep) -> None:
        """The first pass: every forward goes through the float block, and waits at its entry again."""
        run.detours[self._index] = self._passed
        with ExitStack() as stack:
            for name in self._configs:
                layer = self._block.module.get_submodule(name)
                stack.callback(layer.register_forward_pre_hook(self._seeing(name)).remove)
            run.advance(self._index)

    def _passed(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of the block's forward."""
        forward, run = current_forward(), self._run
        if forward is None or run is None:
            return plain(*args, **kwargs)
        if not forward.is_float:
            self._refer_to(forward, tensor_of(plain(*args, **kwargs)))
        run.stop(ENTRY)
        while self._tried is not None and forward in self._references:
            self._tried.append(tokens_of(tensor_of(plain(*args, **kwargs)), forward.call, held_out=self._for_validation))
            run.stop(ENTRY)
        detour = run.detours.get(self._index)
        return plain(*args, **kwargs) if detour is None or detour == self._passed else detour(plain, *args, **kwargs)

    def _seeing(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def see(module: nn.Module, args: tuple[Any, ...]) -> None:
            forward = current_forward()
            if forward is None or forward.is_float:
                return
            x = tokens_of(args[0].detach(), forward.call, held_out=self._for_statistics)
            if not len(x):
                return
            last_forward, last_name, last_x = self._last
            if name not in self._statistics:
                same = last_forward is forward and last_x is args[0]
                self._statistics[name] = (
                    self._statistics[last_name] if same else {kind: kind(x.shape[-1], x.device) for kind in self._kinds}
                )
            mine = self._statistics[name]
            is_counted = last_forward is forward and last_x is args[0] and mine is self._statistics.get(last_name)
            self._last = (forward, name, args[0])
            if not is_counted:
                for statistic in mine.values():
                    statistic.update(x)

        return see

    def _refer_to(self, forward: Forward, output: Tensor) -> None:
        """Keep what a float block makes of the tokens that validate what is done to it."""
        tokens = tokens_of(output, forward.call, held_out=self._for_validation)
        if len(tokens):
            self._references[forward] = tokens

    def _output_error(self) -> OutputError:
        """See `BlockContext.output_error`."""
        with as_rounded(self._block.module, self._configs):
            output = self._output()
        return OutputError.of(output, torch.cat(list(self._references.values())), is_held_out=self._for_validation is not None)

    def _output(self) -> Tensor:
        """See `BlockContext.output`."""
        assert self._run is not None
        tried: list[Tensor] = []
        self._tried = tried
        self._run.go_on(list(self._references))
        self._tried = None
        return torch.cat(tried)
