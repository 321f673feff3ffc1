"""Forwards in lock-step.

Each sample passes each block once, in block order, whatever the forward's own code does.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import nn

from quark.calibration.batches import Call
from quark.calibration.forwards import Forward, conducts_forwards, without_cache
from quark.calibration.lockstep import EndOfBlock, LockStep


class Counting(nn.Module):
    def __init__(self, log: list[tuple[str, float]], name: str) -> None:
        super().__init__()
        self.log, self.name = log, name

    def forward(self, x: torch.Tensor, *, shift: float = 0.0) -> torch.Tensor:
        self.log.append((self.name, float(x.sum())))
        return x + 1 + shift


class Model(nn.Module):
    """Passes each block a keyword of its own, as models with several attention masks do."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.log: list[tuple[str, float]] = []
        self.blocks = nn.ModuleList(Counting(self.log, str(i)) for i in range(depth))
        self.grad_modes: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            with torch.enable_grad():  # a context that spans the pause
                x = block(x, shift=float(i))
        self.grad_modes.append(torch.is_grad_enabled())
        return x


@conducts_forwards
def test_all_samples_pass_a_block_before_any_enters_the_next() -> None:
    model = Model(3)
    samples = [Call((torch.full((n + 1,), float(n)),)) for n in range(4)]
    with LockStep(model, list(model.blocks), samples) as run:
        run.advance(-1)
        assert model.log == []
        for i in range(3):
            run.advance(i)
            assert [name for name, _ in model.log] == [str(b) for b in range(i + 1) for _ in range(4)]
        assert run.finished == 4


@conducts_forwards
def test_forwards_that_are_given_up_leave_the_grad_mode_as_it_was() -> None:
    model = Model(3)
    with LockStep(model, list(model.blocks), [Call((torch.ones(2),))], to_the_end=False) as run:
        run.advance(-1)
        run.advance(0)
    assert torch.is_grad_enabled()


@conducts_forwards
def test_each_sample_sees_what_its_own_forward_computes() -> None:
    plain, stepped = Model(3), Model(3)
    inputs = [torch.full((n + 1,), float(n)) for n in range(3)]
    for x in inputs:
        plain(x)
    with LockStep(stepped, list(stepped.blocks), [Call((x,)) for x in inputs]) as run:
        for i in range(-1, 3):
            run.advance(i)
    assert sorted(plain.log) == sorted(stepped.log)


@conducts_forwards
def test_forwards_may_stop_behind_the_last_block() -> None:
    model = Model(2)
    with LockStep(model, list(model.blocks), [Call((torch.zeros(1),))] * 2, to_the_end=False) as run:
        for i in range(-1, 2):
            run.advance(i)
        assert [name for name, _ in model.log] == ["0", "0", "1", "1"]
        assert run.finished == 0
    assert model.grad_modes == [], "nothing behind the blocks has run"


@conducts_forwards
def test_an_error_in_a_forward_comes_out_of_advance() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3))
    with LockStep(model, list(model), [Call((torch.ones(1, 2),))]) as run:
        run.advance(-1)
        run.advance(0)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            run.advance(1)


@conducts_forwards
def test_leaving_early_ends_paused_forwards_and_takes_the_hooks_away() -> None:
    model = Model(2)
    with LockStep(model, list(model.blocks), [Call((torch.zeros(1),))]) as run:
        run.advance(0)
    assert [name for name, _ in model.log] == ["0"]
    assert not any(b._forward_pre_hooks for b in model.blocks)
    assert model(torch.zeros(1)).item() == 3.0


@conducts_forwards
def test_grad_mode_is_the_callers_again_afterwards() -> None:
    model = Model(2)
    with torch.enable_grad(), LockStep(model, list(model.blocks), [Call((torch.zeros(1),)), Call((torch.ones(2),))]) as run:
        for i in range(-1, 2):
            run.advance(i)
        assert torch.is_grad_enabled()
    assert model.grad_modes == [False, False]


def _deeper(levels: int, call: Callable[[], None]) -> None:
    """Call a function below further frames of the C stack."""
    max([0], key=lambda _: call() or 0 if levels == 0 else _deeper(levels - 1, call) or 0)


@conducts_forwards
def test_a_forward_finds_the_stack_below_it_as_it_was_wherever_it_is_let_go_on(capfd: pytest.CaptureFixture[str]) -> None:
    """An error in torch's C++ walks the whole stack of the thread when it is raised."""
    gather_traceback = torch._C._profiler.gather_traceback

    class Walking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gather_traceback(python=False, script=False, cpp=True)
            return x

    model = nn.Sequential(*(Walking() for _ in range(6)))
    with LockStep(model, [model[1], model[3], model[5]], [Call((torch.zeros(1),))] * 2) as run:
        _deeper(9, lambda: run.advance(-1))
        _deeper(0, lambda: run.advance(0))
        _deeper(30, lambda: run.advance(1))
        run.advance(2)
        assert run.finished == 2
    assert "unwind" not in capfd.readouterr().err.lower()


def test_forwards_are_conducted_by_a_decorated_function() -> None:
    with pytest.raises(RuntimeError, match="conducts_forwards"):
        LockStep(Model(1), [], [Call((torch.zeros(1),))])


@conducts_forwards
def _failing_inside() -> None:
    _failing(ValueError("of the function itself"))


@conducts_forwards
def _failing(error: BaseException) -> None:
    raise error


def test_a_function_that_conducts_forwards_returns_and_raises_as_without_and_may_call_another() -> None:
    variable = ContextVar("variable", default=0)
    variable.set(3)
    assert conducts_forwards(lambda x, *, y: (x, y, variable.get()))(1, y=2) == (1, 2, 3)
    for error in (KeyboardInterrupt(), KeyError("k")):
        with pytest.raises(type(error)) as caught:
            _failing(error)
        assert caught.value is error
    with pytest.raises(ValueError, match="of the function itself"):
        _failing_inside()


def test_without_cache_gives_back_mode_and_switch() -> None:
    model = nn.Linear(2, 2).train()
    model.config = type("Config", (), {"use_cache": True})()
    with without_cache(model):
        assert not model.training
        assert model.config.use_cache is False
    assert model.training
    assert model.config.use_cache is True


def test_without_cache_reaches_the_config_of_the_part_that_makes_text() -> None:
    model = nn.Linear(2, 2)
    text = type("Config", (), {"use_cache": True})()
    model.config = type("Config", (), {"get_text_config": lambda self: text})()
    with without_cache(model):
        assert text.use_cache is False
    assert text.use_cache is True
    assert not hasattr(model.config, "use_cache")


@conducts_forwards
def test_forwards_replay_a_block_with_their_own_arguments_and_are_at_its_entry_again() -> None:
    model = Model(2)
    with LockStep(model, list(model.blocks), [Call((torch.full((1,), float(n)),)) for n in range(3)]) as steps:
        steps.advance(-1)
        steps.at(0).enter()
        block_run = steps.at(1)
        first, *others = block_run.forwards
        outputs = block_run.replay(lambda forward, output: (forward.number, output.item()), block_run.forwards)
        assert list(outputs.values()) == [(n, n + 1.0 + 2.0) for n in range(3)]
        assert block_run.replay(lambda _, output: output.item(), [others[1]]) == {others[1]: 5.0}
        assert block_run.forwards == [first, *others]
        assert block_run.state == "entry"
        block_run.release([first])
        assert block_run.forwards == others
        block_run.enter()
        assert block_run.state == "left"
        assert steps.finished == 3
    assert [name for name, _ in model.log] == ["0"] * 3 + ["1"] * (3 + 1 + 3), "each output is computed once more when it counts"


@conducts_forwards
def test_forwards_outlive_a_replay_that_fails() -> None:
    model = Model(2)

    def fail(forward: Forward, _: Any) -> None:
        raise ArithmeticError(forward.number)

    with LockStep(model, list(model.blocks), [Call((torch.full((1,), float(n)),)) for n in range(3)]) as steps:
        steps.advance(-1)
        block_run = steps.at(0)
        with pytest.raises(ArithmeticError, match=r"^0$"):
            block_run.replay(fail, block_run.forwards)
        assert len(block_run.replay(lambda _, output: output, block_run.forwards)) == 3
        block_run.enter()
        steps.at(1).enter()
        assert steps.finished == 3


@conducts_forwards
def test_a_replay_that_is_ended_early_gives_nothing_and_the_forward_waits_as_before() -> None:
    model = Model(2)

    def end_the_second(plain: Any, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if x.item() == 1:
            raise EndOfBlock
        return plain(x, **kwargs)

    with LockStep(model, list(model.blocks), [Call((torch.full((1,), float(n)),)) for n in range(3)]) as steps:
        steps.advance(-1)
        block_run = steps.at(0)
        with block_run.standing_in(end_the_second):
            outputs = block_run.replay(lambda forward, output: (forward.number, output.item()), block_run.forwards)
        assert list(outputs.values()) == [(0, 1.0), (2, 3.0)]
        assert [forward.number for forward in block_run.forwards] == [0, 1, 2]
        block_run.enter()
        steps.at(1).enter()
        assert steps.finished == 3


@conducts_forwards
def test_a_stand_in_is_called_in_place_of_the_block_and_may_pause_it() -> None:
    model = Model(1)
    with LockStep(model, list(model.blocks), [Call((torch.ones(1),))]) as steps:
        steps.advance(-1)
        block_run = steps.at(0)

        def stand_in(plain, x, **kwargs):  # type: ignore[no-untyped-def]
            block_run.stop("here")
            return plain(2 * x, **kwargs)

        block_run.enter(stand_in)
        assert block_run.state == "inside"
        assert list(block_run.stopped.values()) == ["here"]
        block_run.go_on(list(block_run.stopped))
        assert block_run.state == "left"
    assert model.log == [("0", 2.0)]


@conducts_forwards
def test_what_does_not_belong_to_the_state_of_a_block_is_refused() -> None:
    model = Model(1)
    with LockStep(model, list(model.blocks), [Call((torch.ones(1),))]) as steps:
        steps.advance(-1)
        block_run = steps.at(0)
        with pytest.raises(RuntimeError, match=r"cannot be resumed at a block in the state 'entry'\. The state must be 'inside'"):
            block_run.go_on([])
        block_run.enter()
        for call in (block_run.enter, lambda: block_run.release([]), lambda: block_run.replay(lambda *_: None, [])):
            with pytest.raises(RuntimeError, match=r"at a block in the state 'left'\. The state must be 'entry'"):
                call()


@conducts_forwards
def test_forwards_rehearse_a_block_compute_it_with_gradients_and_leave_with_what_they_have() -> None:
    model = Model(2)
    weight = torch.ones((), requires_grad=True)
    rehearsed: dict[int, float] = {}
    left: list[float] = []
    with LockStep(model, list(model.blocks), [Call((torch.full((1,), float(n)),)) for n in range(2)]) as steps:
        model.blocks[1].register_forward_pre_hook(lambda _, args: left.append(float(args[0])))
        steps.advance(-1)
        run = steps.at(0)
        run.rehearse(lambda forward, output: rehearsed.__setitem__(forward.number, float(output)))
        assert run.state == "left"
        run.end_rehearsal()
        assert (run.state, rehearsed, left) == ("entry", {0: 1.0, 1: 2.0}, [])
        outputs = run.replay(lambda _, output: output * weight, run.forwards, with_gradients=True)
        sum(outputs.values()).backward()  # type: ignore[union-attr]
        assert float(weight.grad) == 3.0  # type: ignore[arg-type]
        run.leave({forward: torch.full((1,), 10.0 + forward.number) for forward in run.forwards})
        assert run.state == "left"
        computed = len(model.log)
        steps.advance(1)
    assert left == [10.0, 11.0]
    assert [name for name, _ in model.log[computed:]] == ["1", "1"]  # the first block was not computed again


@conducts_forwards
def test_what_released_forwards_compute_can_be_kept() -> None:
    model = Model(2)
    kept: list[tuple[int, float]] = []
    with LockStep(model, list(model.blocks), [Call((torch.full((1,), float(n)),)) for n in range(2)], with_float=True) as steps:
        steps.advance(-1)
        run = steps.at(0)
        run.release([f for f in run.forwards if f.is_float], lambda forward, output: kept.append((forward.number, float(output))))
        assert kept == [(0, 1.0), (1, 2.0)]
        assert [f.is_float for f in run.forwards] == [False, False]
