"""Let transforms change a block before it is rounded: a float pass shows them its inputs, and held-out tokens what they have done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from quark.algorithms import BlockAtHand, Statistic, Transform
from quark.model.blocks import Block
from quark.model.plan import PlanRow
from quark.pipeline.lockstep import ENTRY, Forward, LockStep, current_forward
from quark.pipeline.stations import tokens_of
from quark.pipeline.trial import as_rounded, configs_of, relative_error, tensor_of
from quark.specs.architecture import Architecture


class Transforming:
    """Applies transforms to one block.

    Args:
        run: Forwards, of which all wait at the block's entry; they do so again when this has worked. None where no transform needs any.
        index: Of the block.
        block: The block.
        rows: What its layers are going to be.
        transforms: In order.
        architecture: Facts about the family.

    Attributes:
        figures: What the transforms have to say.
    """

    def __init__(
        self,
        run: LockStep | None,
        index: int,
        block: Block,
        rows: Sequence[PlanRow],
        transforms: Sequence[Transform],
        architecture: Architecture,
    ) -> None:
        self._run = run
        self._index = index
        self._block = block
        self._transforms = transforms
        self._architecture = architecture
        self._configs = configs_of(block.name, rows)
        self._kinds = tuple(dict.fromkeys(kind for t in transforms for kind in t.needs))
        self._statistics: dict[str, dict[type[Statistic], Statistic]] = {}
        self._last: tuple[Forward | None, str, Tensor | None] = (None, "", None)
        self._held: Forward | None = None
        self._reference: Tensor | None = None
        self._tried: Tensor | None = None
        self._is_wanted = False
        self._number_of_calls = 0 if run is None else run.calls
        self.figures: dict[str, dict[str, Any]] = {}

    def work(self) -> None:
        """Apply each transform in turn; those that need statistics are shown what the ones before them have made of the block."""
        first = next((i for i, t in enumerate(self._transforms) if t.needs), len(self._transforms))
        self._apply(self._transforms[:first])
        if self._run is not None and self._kinds:
            self._show(self._run)
        self._apply(self._transforms[first:])
        self._reference = None

    def _apply(self, transforms: Sequence[Transform]) -> None:
        at_hand = BlockAtHand(
            self._block.name,
            self._block.module,
            self._architecture,
            self._configs,
            self._statistics,
            self._harm if self._reference is not None else None,
            self._output if self._reference is not None else None,
        )
        for transform in transforms:
            for name, figures in transform.apply(at_hand).items():
                self.figures.setdefault(name, {}).update(figures)

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
            # The last of the samples judges what is done.
            self._held, self._reference = forward, tensor_of(plain(*args, **kwargs))
        run.stop(ENTRY)
        while self._is_wanted and forward is self._held:
            self._tried, self._is_wanted = tensor_of(plain(*args, **kwargs)), False
            run.stop(ENTRY)
        detour = run.detours.get(self._index)
        return plain(*args, **kwargs) if detour is None or detour == self._passed else detour(plain, *args, **kwargs)

    def _seeing(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def see(module: nn.Module, args: tuple[Any, ...]) -> None:
            forward = current_forward()
            if forward is None or forward.is_float or self._judges(forward):
                return
            x = args[0].detach()
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
                    statistic.update(tokens_of(x, forward.call))

        return see

    def _judges(self, forward: Forward) -> bool:
        """Whether a forward's tokens are held out: the last sample's, if there are others."""
        return forward.number > 0 and forward.number == self._number_of_calls - 1

    def _harm(self) -> float:
        """See `BlockAtHand.harm`."""
        assert self._reference is not None
        assert self._held is not None
        with as_rounded(self._block.module, self._configs):
            return relative_error(self._output(), self._reference, self._held.call)

    def _output(self) -> Tensor:
        """See `BlockAtHand.output`."""
        run, held = self._run, self._held
        assert run is not None
        assert held is not None
        self._is_wanted = True
        run.go_on([held])
        found, self._tried = self._tried, None
        assert found is not None
        return found
