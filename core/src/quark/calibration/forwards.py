"""Forward: one forward of a model as a greenlet, which can pause in the middle of the model's own code.

`replaced_forward` and `without_cache` change a model while forwards run, and give it back as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from greenlet import getcurrent, greenlet
from torch import nn

from quark.calibration.batches import Call

__all__ = ["Forward", "current_forward", "replaced_forward", "without_cache"]


class Forward(greenlet):
    """One forward of a run.

    Attributes:
        call: What the model is called with.
        number: Of the call, among those of all ranks.
        is_float: Whether it is to compute what the float model does, beside one that computes what the
            quantized model does.
        is_probe: Whether it is a float forward of `quark.calibration.model_error`, which goes on by itself.
        rehearsal: The object for which it computes something now that it will compute again, such as a
            `BlockRun`; else None.
    """

    def __init__(self, call: Call, number: int, is_float: bool, parent: Any, is_probe: bool = False) -> None:
        super().__init__(call.run, parent)
        self.call = call
        self.number = number
        self.is_float = is_float
        self.is_probe = is_probe
        self.rehearsal: Any = None


def current_forward() -> Forward | None:
    """Return the forward that this code runs in, or None outside of one."""
    current = getcurrent()
    return current if isinstance(current, Forward) else None


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Keep a model in evaluation mode and without a KV cache, which calibration would only fill.

    The cache is switched off where a config has the switch: of models of several parts that of the part that
    makes text, and a decoder behind an encoder may have a config of its own.
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
    """Let ``forward`` stand in for the module's own while the body runs; hooks go on as they do."""
    own = module.__dict__.get("forward")  # of a module that others have wrapped
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
