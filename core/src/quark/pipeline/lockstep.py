"""Run many forwards through one model in lock-step: all of them reach a block before any enters it.

Each forward is a greenlet that pauses in the middle of the model's own code, so no arguments are captured, none are replayed from another
sample, and any module code will do. One forward per sample in all, whatever the number of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import nn

from quark.pipeline.batches import Call


class LockStep:
    """Forwards of ``model``, one per call, that stop at the entry of each block.

    Args:
        model: Called for each call, without gradients.
        blocks: The modules to stop at, in the order in which a forward enters them.
        calls: Arguments of each forward.
        to_the_end: Whether forwards go on behind the last block; without, they stop there, and the output head is never computed.

    Use as a context manager: it registers hooks and takes them away.

    Example:
        >>> from torch import ones
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> with LockStep(model, list(model), [Call((ones(1, 2),))]) as run:
        ...     run.advance(-1)   # up to the first block
        ...     run.advance(0)    # through the first block, up to the second
        ...     run.finished
        0
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], calls: Sequence[Call], *, to_the_end: bool = True) -> None:
        self._to_the_end = to_the_end
        self._model = model
        self._blocks = list(blocks)
        self._calls = list(calls)
        self._released = -1
        self._parent = getcurrent()
        self._waiting: dict[Any, int] = {}
        self._hooks: list[Any] = []
        self._started = False
        self.finished = 0

    def __enter__(self) -> Self:
        self._hooks = [b.register_forward_pre_hook(self._gate(i), prepend=True) for i, b in enumerate(self._blocks)]
        if not self._to_the_end:
            self._hooks.append(self._blocks[-1].register_forward_hook(self._gate(len(self._blocks))))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()
        for paused in list(self._waiting):
            paused.throw(GreenletExit)
        self._waiting.clear()

    @torch.no_grad()
    def advance(self, block: int) -> None:
        """Let every forward run until it waits at a block beyond ``block``, or ends.

        An exception in a forward comes out here.
        """
        self._released = block
        if not self._started:
            self._started = True
            for call in self._calls:
                self._resume(greenlet(call.run, parent=self._parent), self._model)
            return
        for paused in [g for g, at in self._waiting.items() if at <= block]:
            del self._waiting[paused]
            self._resume(paused)

    def _resume(self, forward: Any, *args: Any) -> None:
        forward.switch(*args)
        # Grad mode belongs to the thread, not to the greenlet: a forward that pauses inside a context of its own must not leak it.
        torch.set_grad_enabled(False)
        self.finished += bool(forward.dead)

    def _gate(self, index: int) -> Any:
        def pause(*_: Any) -> None:
            current = getcurrent()
            if index > self._released and current is not self._parent:
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
