"""Runs many forward passes in lock-step: no pass continues beyond a place before all have reached the place.

Each forward pass is a greenlet that pauses in the middle of the model's own code. So no arguments need to be
captured, and any module code works. Each sample needs only one forward pass, however many blocks and pauses
there are. One forward pass runs at a time. The states of a forward pass are::

    fresh ─── advance ───▶ running ─── the model returns ───▶ finished
                            ▲   │
            advance, go_on  │   ├─── entry of a block that is not released ───▶ waiting ───┐
                            │   └─── stop(place) ───▶ stopped ─────────────────────────────┤
                            └──────────────────────────────────────────────────────────────┘

A forward pass is in the state ``stopped`` at a pause point inside a block. After a replay, it is ``stopped``
at the entry of its block. At the end of the run, all forward passes that wait or are stopped are ended.
`BlockRun` controls the forward passes at one block, and has its own states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import attrs
import torch
from torch import nn

from quark.base.ranks import ALONE, Ranks
from quark.calibration.batches import Call
from quark.calibration.forwards import Forward, current_forward, replaced_forward
from quark.calibration.sample_grid import SampleGrid
from quark.calibration.spilled_inputs import SpilledInputs

T = TypeVar("T")

_ENTRY = "entry"
"""The place where a forward pass stops after a replay: the entry of the block."""


@attrs.define(eq=False, slots=False)
class LockStep:
    """Runs the forward passes of ``model``, one or two per call. They stop at blocks and where `stop` is
    called.

    Args:
        model: The model. It is called without gradients.
        blocks: The modules at whose entry forward passes stop, in the order in which a forward pass calls
            them.
        calls: Arguments of the forward passes of all ranks. Each rank runs only its own part.
        to_the_end: Whether forward passes continue after the last block. If not, they stop after the last
            block, and the output head is never computed.
        with_float: Whether each call has a second forward pass, which computes the outputs of the float
            model.
        spilled: Storage for the tensors of forward passes that wait at a block. If it is None, the tensors
            stay in memory.
        ranks: The processes that share the calls.
        probed: Arguments of additional float passes. Only `BlockRun.release` advances these passes. They run
            on the rank that runs the first call.

    Use the object as a context manager, inside a function that is decorated with
    `quark.calibration.forwards.conducts_forwards`. It registers hooks and removes them at the end.

    Attributes:
        grid: The calls of all ranks, divided among the ranks.
        holds_out: Whether tokens of any call are held out.
        stopped: A dictionary from each forward pass that has called `stop` to the place that was passed to
            `stop`. `go_on` removes the passes that it resumes.
        finished: Number of forward passes that have ended.
        probes: The forward passes of ``probed``.

    Example:
        >>> from torch import ones
        >>> from quark.calibration.forwards import conducts_forwards
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> @conducts_forwards
        ... def finished_at_the_second_block():
        ...     with LockStep(model, list(model), [Call((ones(1, 2),))]) as run:
        ...         run.advance(-1)   # up to the first block
        ...         run.advance(0)    # through the first block, up to the second
        ...         return run.finished
        >>> finished_at_the_second_block()
        0
    """

    _model: nn.Module
    _blocks: Sequence[nn.Module]
    _calls: Sequence[Call]
    _to_the_end: bool = attrs.field(default=True, kw_only=True)
    _with_float: bool = attrs.field(default=False, kw_only=True)
    _spilled: SpilledInputs | None = attrs.field(default=None, kw_only=True)
    _ranks: Ranks = attrs.field(default=ALONE, kw_only=True)
    _probed: Sequence[Call] = attrs.field(default=(), kw_only=True)

    def __attrs_post_init__(self) -> None:
        self._released = -1
        # The float pass of a call runs first, because the other pass of the call may be compared with it.
        kinds = (True, False) if self._with_float else (False,)
        self.grid = SampleGrid(len(self._calls), self._ranks)
        own = list(enumerate(self._calls))[self.grid.own]
        self._fresh = [Forward(call, i, is_float) for i, call in own for is_float in kinds]
        has_first = bool(own) and own[0][0] == 0
        self.probes = [Forward(call, len(self._calls) + i, True, True) for i, call in enumerate(self._probed) if has_first]
        self._fresh += self.probes
        self._waiting: dict[Forward, int] = {}
        self._taken_back = ExitStack()
        self.holds_out = any(call.held_out is not None for call in self._calls)
        self.stopped: dict[Forward, Any] = {}
        self._block_runs: dict[int, BlockRun] = {}
        self.finished = 0

    def __enter__(self) -> Self:
        for i, block in enumerate(self._blocks):
            self._taken_back.callback(block.register_forward_pre_hook(self._gate(i), prepend=True, with_kwargs=True).remove)
            # A module looks up its `forward` method before its hooks run, so the method must be replaced
            # before a forward pass waits there.
            self._taken_back.enter_context(replaced_forward(block, self._forward_of(i, block.forward)))
        if not self._to_the_end:
            self._taken_back.callback(self._blocks[-1].register_forward_hook(self._gate(len(self._blocks))).remove)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._taken_back.close()
        enabled = torch.is_grad_enabled()
        for paused in [*self._waiting, *self.stopped]:
            paused.end()
        torch.set_grad_enabled(enabled)  # forward passes that end inside a grad-mode context leave its mode set
        self._waiting.clear()
        self.stopped.clear()

    @torch.no_grad()
    def advance(self, block: int) -> None:
        """Run every forward pass until it waits at a block beyond ``block``, stops, or ends.

        If a forward pass raises an exception, the method that has resumed it (this one or `go_on`) raises it.
        """
        self._released = block
        fresh, self._fresh = self._fresh, []
        for forward in fresh:
            self._resume(forward, self._model)
        self.go_on(f for f in self.at_entry(block) if f not in fresh)

    def at_entry(self, block: int) -> list[Forward]:
        """Return the forward passes that wait at the entry of a block. The float pass of a call comes
        first.
        """
        waiting = [f for f, at in self._waiting.items() if at <= block and not f.is_probe]
        waiting += [f for f, place in self.stopped.items() if place is _ENTRY]
        return sorted(waiting, key=lambda f: (f.number, not f.is_float))

    def at(self, block: int) -> BlockRun:
        """Return a `BlockRun` for a block at whose entry the forward passes wait."""
        self._block_runs = {block: BlockRun(self, block)}
        return self._block_runs[block]

    def stop(self, place: Any) -> None:
        """Pause the current forward pass until `go_on`."""
        current = current_forward()
        assert current is not None
        self.stopped[current] = place
        if self._spilled is not None:
            self._spilled.leave(current)
        current.pause()

    @torch.no_grad()
    def go_on(self, forwards: Iterable[Forward]) -> None:
        """Resume waiting or stopped forward passes, one after another.

        Each of them runs until it waits or stops again, or until it ends.
        """
        for forward in forwards:
            self._waiting.pop(forward, None)
            self.stopped.pop(forward, None)
            self._resume(forward)

    def _resume(self, forward: Forward, *args: Any) -> None:
        forward.go_on(*args)
        # The grad mode belongs to the thread, not to the greenlet. If a forward pass pauses inside a
        # grad-mode context, its mode must not stay set.
        torch.set_grad_enabled(False)
        self.finished += bool(forward.dead)

    def _forward_of(self, index: int, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            block_run = self._block_runs.get(index)
            return plain(*args, **kwargs) if block_run is None else block_run.forward(plain, *args, **kwargs)

        return forward

    def _gate(self, index: int) -> Any:
        def pause(_: nn.Module, *arguments: Any) -> None:
            current = current_forward()
            if index > self._released and current is not None:
                self._waiting[current] = index
                if self._spilled is not None:
                    self._spilled.hold(current, arguments)
                current.pause()

        return pause


class EndOfBlock(Exception):  # noqa: N818 - not an error: it ends a forward pass early
    """Exception that ends a replay inside a block, without a result. A hook raises it."""


class BlockRun:
    """Controls all forward passes at one block, from their arrival at its entry until they leave the block.

    A method that is not allowed in the current state raises RuntimeError::

        ┌─ replay: compute the block, come back    ┌─ go_on: to the next place
        ▼                                          ▼
      "entry" ──────── enter, rehearse ────────▶ "inside" ──── go_on: the last ────▶ "left"
        │ ▲                                                                           │ ▲
        │ └───────────────── end_rehearsal: all come back, as before ─────────────────┘ │
        └───────── leave: with outputs computed before; release: some, ahead ───────────┘

    In ``"entry"``, every forward pass waits in front of the block, with its own arguments. In ``"inside"``,
    some forward passes have called `stop`, for example at layers that are not rounded yet; `stopped` has
    their places. In ``"left"``, all forward passes wait at the next block or have ended.

    Args:
        steps: Runs the forward passes in lock-step.
        index: Number of the block.
    """

    def __init__(self, steps: LockStep, index: int) -> None:
        self._steps = steps
        self._index = index
        self._has_entered = False
        self._keep: Callable[[Forward, Any], None] | None = None
        self._keep_on_leaving: Callable[[Forward, Any], None] | None = None
        self._has_gradients = False
        self._failure: Exception | None = None
        self._outputs: dict[Forward | None, Any] = {}
        self._stand_in: Callable[..., Any] | None = None

    @property
    def state(self) -> Literal["entry", "inside", "left"]:
        """Where the forward passes are."""
        return "entry" if not self._has_entered else "inside" if self.stopped else "left"

    @property
    def forwards(self) -> list[Forward]:
        """The forward passes that wait at the block's entry. The float pass of a call comes first."""
        return self._steps.at_entry(self._index)

    @property
    def probes(self) -> list[Forward]:
        """The additional float passes, which wait at the block's entry until they are released."""
        return self._steps.probes

    @property
    def stopped(self) -> dict[Forward, Any]:
        """A dictionary from each forward pass that waits inside the block to the place that it has passed to
        `stop`.
        """
        return {forward: place for forward, place in self._steps.stopped.items() if place is not _ENTRY}

    @property
    def grid(self) -> SampleGrid:
        """The calls of the run, divided among the ranks."""
        return self._steps.grid

    @property
    def holds_out(self) -> bool:
        """Whether tokens of any call of any rank are held out."""
        return self._steps.holds_out

    def replay(self, keep: Callable[[Forward, Any], T], forwards: Iterable[Forward], *, with_gradients: bool = False) -> dict[Forward, T]:
        """Let forward passes compute the block, each with its own arguments.

        Afterwards, the forward passes wait at the entry of the block again.

        Args:
            keep: Called with each forward pass and the block's output. The results of ``keep`` are returned.
            forwards: Some of the forward passes at the entry, in the order in which they run.
            with_gradients: Whether autograd records the computation of the block.

        Raises:
            Exception: The first error of the block or of ``keep``. All forward passes wait at the entry even
                after an error.
        """
        self._expect("entry", "replayed")
        results: dict[Forward, T] = {}
        self._keep, self._has_gradients = lambda forward, output: results.__setitem__(forward, keep(forward, output)), with_gradients
        self._steps.go_on(list(forwards))
        self._keep, self._has_gradients = None, False
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return results

    def release(self, forwards: Iterable[Forward], keep: Callable[[Forward, Any], None] | None = None) -> None:
        """Let ``forwards`` run through the block to the next block. All other passes stay at the entry.

        Args:
            forwards: Some of the forward passes at the entry, or some of `probes`.
            keep: Called for each forward pass, with the block's output.
        """
        self._expect("entry", "released")
        self._keep_on_leaving = keep
        self._steps.go_on(list(forwards))
        self._keep_on_leaving = None

    def rehearse(self, keep: Callable[[Forward, Any], None], stand_in: Callable[..., Any] | None = None) -> None:
        """Let all forward passes into the block, where they may stop. After the end of the block, they wait
        at its entry again.

        The state is ``"inside"`` as long as a forward pass is stopped in the block. When no pass is stopped,
        call `end_rehearsal`, which sets the state to ``"entry"``.

        Args:
            keep: Called for each forward pass, with the block's output.
            stand_in: As in `enter`. Until the rehearsal ends, `replay` calls it too.
        """
        self._expect("entry", "let in")
        self._has_entered, self._stand_in, self._keep = True, stand_in, keep
        self._steps.go_on(self.forwards)

    def end_rehearsal(self) -> None:
        """End a rehearsal. Every forward pass then waits at the entry, as before the rehearsal."""
        self._expect("left", "moved back to the entry")
        self._has_entered, self._keep = False, None

    def leave(self, outputs: Mapping[Forward, Any]) -> None:
        """Let all forward passes leave the block.

        A forward pass in ``outputs`` does not compute the block again. It continues with this output, which a
        rehearsal or a replay has computed.
        """
        self._expect("entry", "moved out")
        self._has_entered, self._outputs = True, dict(outputs)
        self._steps.advance(self._index)

    @contextmanager
    def standing_in(self, stand_in: Callable[..., Any]) -> Iterator[None]:
        """Let `replay` call ``stand_in`` instead of the block in the body of the ``with`` statement.

        ``stand_in`` is as in `enter`.
        """
        self._expect("entry", "given another block")
        before, self._stand_in = self._stand_in, stand_in
        try:
            yield
        finally:
            self._stand_in = before

    def enter(self, stand_in: Callable[..., Any] | None = None) -> None:
        """Let all forward passes into the block.

        Args:
            stand_in: A function that is called instead of the block's ``forward`` method. It gets that method
                and the arguments of the call. If it is None, the method is called.
        """
        self._expect("entry", "let in")
        self._has_entered, self._stand_in = True, stand_in
        self._steps.advance(self._index)

    def go_on(self, forwards: Iterable[Forward]) -> None:
        """Resume forward passes that are stopped inside the block."""
        self._expect("inside", "resumed")
        self._steps.go_on(forwards)

    def stop(self, place: Any) -> None:
        """Pause the current forward pass until `go_on`."""
        self._steps.stop(place)

    def forward(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the block in place of the block's own ``forward`` method, which is ``plain``."""
        current = current_forward()
        while current is not None and self._keep is not None:
            current.rehearsal = None if self._has_entered else self
            with torch.set_grad_enabled(self._has_gradients):
                try:
                    self._keep(current, self._plain(plain, *args, **kwargs))
                except EndOfBlock:
                    pass
                except Exception as error:
                    if self._has_entered:
                        raise
                    self._failure = self._failure or error
            current.rehearsal = None
            self._steps.stop(_ENTRY)
        if current in self._outputs:
            return self._outputs.pop(current)
        output = self._plain(plain, *args, **kwargs)
        if current is not None and self._keep_on_leaving is not None:
            self._keep_on_leaving(current, output)
        return output

    def _plain(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs) if self._stand_in is None else self._stand_in(plain, *args, **kwargs)

    def _expect(self, state: str, what: str) -> None:
        if self.state != state:
            raise RuntimeError(f"forward passes cannot be {what} at a block in the state '{self.state}'. The state must be '{state}'")
