"""Forward: one forward of a model as a greenlet, which can pause in the middle of the model's own code.

A function that runs forwards is decorated with `conducts_forwards`. `replaced_forward` and `without_cache`
change a model while forwards run, and restore it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar, cast

from greenlet import GreenletExit, getcurrent, greenlet
from torch import nn

from quark.calibration.batches import Call

P = ParamSpec("P")
R = TypeVar("R")


class _Conductor(greenlet):
    """A function decorated with `conducts_forwards`; its parent starts and resumes the forwards."""


def conducts_forwards(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function create, start and resume forwards.

    When torch's C++ code raises an error, it walks down the whole stack of the thread. A greenlet owns only
    the upper part of that stack: below are the frames of its starter. If these have ended when the greenlet
    resumes, the walk reads overwritten memory, and the process crashes with a segmentation fault. So one
    frame, which lasts as long as the function, starts and resumes each forward, with a single call.
    """

    @wraps(function)
    def conducted(*args: P.args, **kwargs: P.kwargs) -> R:
        conductor = _Conductor(partial(function, *args, **kwargs))
        conductor.gr_context = copy_context()
        running: greenlet = conductor
        message: tuple[Any, ...] = ()
        result: Any = None
        while not conductor.dead:
            try:
                result = running.switch(*message)  # the only call that starts or resumes a greenlet
                running, message = result if running is conductor and not conductor.dead else (conductor, (None,))
            except BaseException as error:
                if conductor.dead:
                    message = ()  # drops the reported error, which would refer to itself
                    raise
                running, message = conductor, (error,)
        return cast("R", result)

    return conducted


class Forward(greenlet):
    """One forward of a run.

    Attributes:
        call: Arguments of the model.
        number: Number of the call, among the calls of all ranks.
        is_float: Whether it computes the float model's outputs, beside a forward that computes the quantized
            model's.
        is_probe: Whether it is a float forward of `quark.calibration.model_error`, which advances by itself.
        rehearsal: The object, such as a `BlockRun`, that makes it compute something now and again later; None
            outside of such a rehearsal.
    """

    def __init__(self, call: Call, number: int, is_float: bool, is_probe: bool = False) -> None:
        conductor = getcurrent()
        if not isinstance(conductor, _Conductor):
            raise RuntimeError("forwards run in lock-step only inside a function that is decorated with conducts_forwards")
        super().__init__(call.run, conductor.parent)
        self.call = call
        self.number = number
        self.is_float = is_float
        self.is_probe = is_probe
        self.rehearsal: Any = None

    def go_on(self, *args: Any) -> None:
        """Start it with ``args``, or resume it, until it pauses or ends; its errors are raised here."""
        assert self.parent is not None
        error = self.parent.switch(self, args)
        if error is not None:
            raise error

    def pause(self) -> None:
        """Return to the caller of `go_on`; called in the forward itself."""
        assert self.parent is not None
        if self.parent.switch():
            raise GreenletExit

    def end(self) -> None:
        """End it at its pause."""
        self.go_on(True)


def current_forward() -> Forward | None:
    """Return the forward that this code runs in, or None outside of one."""
    current = getcurrent()
    return current if isinstance(current, Forward) else None


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Keep a model in evaluation mode and without a KV cache, which calibration would only fill.

    The cache is switched off in every config with that switch: in a model of several parts, its text part has
    one, and a decoder after an encoder may have its own config.
    """
    configs = [cast("Any", module.config) for module in model.modules() if hasattr(module, "config")]
    configs += [config.get_text_config() for config in configs if hasattr(config, "get_text_config")]
    used = {id(c): (c, c.use_cache) for c in configs if getattr(c, "use_cache", None) is not None}
    training = model.training
    model.eval()
    for c, _ in used.values():
        c.use_cache = False
    try:
        yield
    finally:
        model.train(training)
        for c, before in used.values():
            c.use_cache = before


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let ``forward`` replace the module's own while the body runs; hooks still run."""
    own = module.__dict__.get("forward")  # set if others have wrapped the forward
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def is_counted() -> bool:
    """Return whether tokens of the current forward count.

    Tokens of the float model and of a rehearsal, which is repeated, do not.
    """
    forward = current_forward()
    return forward is None or not (forward.is_float or forward.rehearsal is not None)


@contextmanager
def counting(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, int]]:
    """Count the tokens that reach each of these layers while the body runs."""
    tokens = dict.fromkeys(names, 0)

    def see(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if is_counted():
                tokens[name] += args[0].numel() // args[0].shape[-1]

        return hook

    with ExitStack() as stack:
        for name in tokens:
            stack.callback(model.get_submodule(name).register_forward_pre_hook(see(name)).remove)
        yield tokens
