"""Forward: one forward pass of a model. It runs as a greenlet, so it can pause inside the model's own code.

A function that runs forward passes is decorated with `conducts_forwards`. `replaced_forward` and
`without_cache` change a model while forward passes run, and restore it.
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
    """The greenlet of a function that is decorated with `conducts_forwards`.

    The parent of this greenlet starts and resumes the forward passes.
    """


def conducts_forwards(function: Callable[P, R]) -> Callable[P, R]:
    """Return a version of a function that may create, start and resume forward passes.

    When torch's C++ code raises an error, the error handling reads the whole stack of the thread. A greenlet
    owns only the upper part of that stack; the lower part has the frames of the code that started the
    greenlet. If these frames have ended when the greenlet is resumed, the error handling reads overwritten
    memory, and the process crashes with a segmentation fault. So all forward passes are started and resumed
    by a single call in one frame, and this frame lasts as long as the function.
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
    """One forward pass of a run.

    Attributes:
        call: Arguments of the model.
        number: Index of the call in the list of the calls of all ranks.
        is_float: Whether this pass computes the outputs of the float model. Another forward pass then
            computes the outputs of the quantized model for the same call.
        is_probe: Whether this is a float pass of `quark.calibration.model_error`. Such a pass is advanced
            separately.
        rehearsal: The object that makes the pass compute something twice, now and again later. An example is
            a `BlockRun`. None outside of such a rehearsal.
    """

    def __init__(self, call: Call, number: int, is_float: bool, is_probe: bool = False) -> None:
        conductor = getcurrent()
        if not isinstance(conductor, _Conductor):
            raise RuntimeError("forward passes run in lock-step only inside a function that is decorated with conducts_forwards")
        super().__init__(call.run, conductor.parent)
        self.call = call
        self.number = number
        self.is_float = is_float
        self.is_probe = is_probe
        self.rehearsal: Any = None

    def go_on(self, *args: Any) -> None:
        """Start the forward pass with ``args``, or resume it. Return when it pauses or ends.

        If the forward pass raises an error, this method raises the error.
        """
        assert self.parent is not None
        error = self.parent.switch(self, args)
        if error is not None:
            raise error

    def pause(self) -> None:
        """Pause this forward pass, and continue in the caller of `go_on`.

        Only code that runs inside the forward pass may call this method.
        """
        assert self.parent is not None
        if self.parent.switch():
            raise GreenletExit

    def end(self) -> None:
        """End the forward pass at the place where it has paused."""
        self.go_on(True)


def current_forward() -> Forward | None:
    """Return the forward pass in which the calling code runs, or None if it does not run in a forward
    pass.
    """
    current = getcurrent()
    return current if isinstance(current, Forward) else None


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode and switch off its KV cache in the body of the ``with`` statement.

    Calibration would only fill the cache and never read it. The cache is switched off in every config that
    has ``use_cache``. A model with several parts has several such configs, for example one of the text part
    and one of a decoder.
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
    """Replace the ``forward`` method of a module in the body of the ``with`` statement. Hooks still run."""
    own = module.__dict__.get("forward")  # set if other code has wrapped the method
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def is_counted() -> bool:
    """Return whether the tokens of the current forward pass are counted and observed.

    The tokens of the float model are not counted. The tokens of a rehearsal are not counted either, because
    its computation is repeated later.
    """
    forward = current_forward()
    return forward is None or not (forward.is_float or forward.rehearsal is not None)


@contextmanager
def counting(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, int]]:
    """Count the tokens that reach each layer in ``names`` while the body of the ``with`` statement runs.

    The yielded dictionary maps each layer name to a number of tokens. It is updated while the body runs.
    """
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
