"""Let transforms change a block before it is rounded: a float pass shows them its inputs, and held-out tokens what they have done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from quark.algorithms import BlockAtHand, RoundToNearest, Statistic, Transform
from quark.model.blocks import Block
from quark.model.plan import PlanRow
from quark.nn import QuantizedLayer, quantized_class
from quark.pipeline.lockstep import ENTRY, Forward, LockStep, current_forward, replaced_forward
from quark.pipeline.problems import problems
from quark.pipeline.solving import static_input
from quark.pipeline.stations import tokens_of
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
        prefix = f"{block.name}." if block.name else ""
        self._configs = {
            r.name.removeprefix(prefix): r.config
            for r in rows
            if r.config is not None and r.config.weight is not None and r.module_type == nn.Linear.__name__
        }
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
            self._held, self._reference = forward, _tensor_of(plain(*args, **kwargs))
        run.stop(ENTRY)
        while self._is_wanted and forward is self._held:
            self._tried, self._is_wanted = _tensor_of(plain(*args, **kwargs)), False
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
                    statistic.update(tokens_of(x, forward))

        return see

    def _judges(self, forward: Forward) -> bool:
        """Whether a forward's tokens are held out: the last sample's, if there are others."""
        return forward.number > 0 and forward.number == self._number_of_calls - 1

    def _harm(self) -> float:
        """See `BlockAtHand.harm`."""
        assert self._reference is not None
        with ExitStack() as stack:
            for layer, made in self._rounded().values():
                stack.enter_context(replaced_forward(layer, _trying(made)))
            found = self._output()
        reference = self._reference.float()
        error = (found.float() - reference).square().sum()
        return float(error / reference.square().sum().clamp(min=torch.finfo(torch.float32).tiny))

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

    def _rounded(self) -> dict[str, tuple[nn.Module, QuantizedLayer]]:
        """Every layer, and a copy of it that is rounded to nearest."""
        nearest = RoundToNearest()
        found = {}
        for name, config in self._configs.items():
            layer = self._block.module.get_submodule(name)
            found[name] = (layer, quantized_class(layer).from_float(layer, config))
        for problem in problems({name: made for name, (_, made) in found.items()}, ()):
            nearest.round(problem)
        return found


def _trying(made: QuantizedLayer) -> Callable[..., Any]:
    """A layer's forward through its rounded copy; a static input scale is that of the first input."""

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        module = static_input(made)
        if module is not None and module.qparams is None:
            observer = module.quantizer.observer()
            observer.observe(x)
            module.set_qparams(module.quantizer.qparams_from(observer))
        return made.product(x, *args, **kwargs)

    return forward


def _tensor_of(output: Any) -> Tensor:
    """What a block adds to the residual stream: its output, or the first of several."""
    found: Tensor = output if isinstance(output, Tensor) else output[0]
    return found
