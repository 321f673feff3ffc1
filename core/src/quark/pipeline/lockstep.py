"""Run many forwards through one model in lock-step: all of them reach a place before any goes beyond it.

Each forward is a greenlet that pauses in the middle of the model's own code, so no arguments are captured, none are replayed from another
sample, and any module code will do. One forward per sample in all, whatever the number of blocks, and of pauses inside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import nn

from quark.pipeline.batches import Call


class Forward(greenlet):
    """One forward of a run.

    Attributes:
        call: What the model is called with.
        number: Of the call.
        is_float: Whether it is to compute what the float model does, beside one that computes what the quantized model does.
    """

    def __init__(self, call: Call, number: int, is_float: bool, parent: Any) -> None:
        super().__init__(call.run, parent)
        self.call = call
        self.number = number
        self.is_float = is_float


def current_forward() -> Forward | None:
    """The forward that this code runs in, or None outside of one."""
    current = getcurrent()
    return current if isinstance(current, Forward) else None


class LockStep:
    """Forwards of ``model``, one or two per call, that stop at the entry of each block, and wherever they are told to.

    Args:
        model: Called for each call, without gradients.
        blocks: The modules to stop at, in the order in which a forward enters them.
        calls: Arguments of each forward.
        to_the_end: Whether forwards go on behind the last block; without, they stop there, and the output head is never computed.
        with_float: Whether each call has a second forward, which is to compute what the float model does.

    Use as a context manager: it registers hooks and takes them away.

    Attributes:
        stopped: Forwards that have called `stop`, with the place they gave; `go_on` takes them out.
        finished: How many forwards have ended.

    Example:
        >>> from torch import ones
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> with LockStep(model, list(model), [Call((ones(1, 2),))]) as run:
        ...     run.advance(-1)   # up to the first block
        ...     run.advance(0)    # through the first block, up to the second
        ...     run.finished
        0
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], calls: Sequence[Call], *, to_the_end: bool = True, with_float: bool = False
    ) -> None:
        self._to_the_end = to_the_end
        self._model = model
        self._blocks = list(blocks)
        self._released = -1
        self._parent = getcurrent()
        kinds = (False, True) if with_float else (False,)
        self._fresh = [Forward(call, i, is_float, self._parent) for is_float in kinds for i, call in enumerate(calls)]
        self._waiting: dict[Forward, int] = {}
        self._hooks: list[Any] = []
        self.stopped: dict[Forward, Any] = {}
        self.finished = 0

    def __enter__(self) -> Self:
        self._hooks = [b.register_forward_pre_hook(self._gate(i), prepend=True) for i, b in enumerate(self._blocks)]
        if not self._to_the_end:
            self._hooks.append(self._blocks[-1].register_forward_hook(self._gate(len(self._blocks))))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()
        for paused in [*self._waiting, *self.stopped]:
            paused.throw(GreenletExit)
        self._waiting.clear()
        self.stopped.clear()

    @torch.no_grad()
    def advance(self, block: int) -> None:
        """Let every forward run until it waits at a block beyond ``block``, stops, or ends.

        An exception in a forward comes out here, and in `go_on`.
        """
        self._released = block
        fresh, self._fresh = self._fresh, []
        for forward in fresh:
            self._resume(forward, self._model)
        for forward in [f for f, at in self._waiting.items() if at <= block and f not in fresh]:
            del self._waiting[forward]
            self._resume(forward)

    def stop(self, place: Any) -> None:
        """Pause the forward that this is called in, until `go_on`."""
        current = current_forward()
        assert current is not None
        self.stopped[current] = place
        self._parent.switch()

    @torch.no_grad()
    def go_on(self, forwards: Iterable[Forward]) -> None:
        """Let stopped forwards run on, one after another, each until it waits, stops again, or ends."""
        for forward in forwards:
            del self.stopped[forward]
            self._resume(forward)

    def _resume(self, forward: Forward, *args: Any) -> None:
        forward.switch(*args)
        # Grad mode belongs to the thread, not to the greenlet: a forward that pauses inside a context of its own must not leak it.
        torch.set_grad_enabled(False)
        self.finished += bool(forward.dead)

    def _gate(self, index: int) -> Any:
        def pause(*_: Any) -> None:
            current = current_forward()
            if index > self._released and current is not None:
                self._waiting[current] = index
                self._parent.switch()

        return pause


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode and, where its config has the switch, without a key-value cache, which calibration would only fill."""
    config = getattr(model, "config", None)
    used = getattr(config, "use_cache", None)
    training = model.training
    model.eval()
    if used is not None:
        config.use_cache = False  # type: ignore[union-attr]
    try:
        yield
    finally:
        model.train(training)
        if used is not None:
            config.use_cache = used  # type: ignore[union-attr]
