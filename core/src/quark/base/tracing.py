"""`tracing` restores the state that torch.export changes in a process, and drops the traces that torch
keeps."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_PREFIXES = ("TORCH", "TRITON")
"""Prefixes of the environment variables that torch's compiler sets when it is first imported."""
_TRACE_LOGGER = "torch.__trace"
"""The logger from which torch removes its handler at the first trace, if no folder for traces is set."""


@contextmanager
def tracing() -> Iterator[list[ExportedProgram]]:
    """Run a ``with`` block that traces a model, and undo what torch changes in the process during the trace.

    This context restores the environment variables of torch's compiler and the handlers of torch's trace
    logger. It prevents torch from starting a thread that watches progress bars. It also empties the caches in
    which torch keeps the last trace with all parameters of the model.

    Yields:
        An empty list. The ``with`` block must append each program that torch returns. A program is part of a
        reference cycle through C++ objects, which Python's garbage collector cannot find. These cycles are
        broken when the ``with`` block ends.
    """
    programs: list[ExportedProgram] = []
    logger, random_states = logging.getLogger(_TRACE_LOGGER), _random_states()
    variables, handlers, seeds = _variables(), list(logger.handlers), dict(vars(random_states))
    try:
        with _no_watched_bars():
            yield programs
    finally:
        for name in _variables().keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        logger.handlers[:] = handlers
        _restore(random_states, seeds)
        _break_cycles(programs)
        _empty_caches()


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}


def _random_states() -> Any:
    """Return the class of torch that stores the random states of the last trace as tensors."""
    return import_module("torch._decomp.decompositions_for_rng").PhiloxStateTracker


def _restore(random_states: Any, seeds: dict[str, Any]) -> None:
    for name in [name for name in vars(random_states) if name.endswith("_state")]:
        if name in seeds:
            setattr(random_states, name, seeds[name])
        else:
            delattr(random_states, name)


@contextmanager
def _no_watched_bars() -> Iterator[None]:
    """Inside the ``with`` block, keep torch's progress bars from starting a thread. Even a disabled bar would
    start one."""
    bar: Any = import_module("torch.hub").tqdm  # of the package tqdm, or torch's own without it
    interval = getattr(bar, "monitor_interval", None)
    if interval is None:
        yield
        return
    bar.monitor_interval = 0
    try:
        yield
    finally:
        bar.monitor_interval = interval


def _break_cycles(programs: Iterable[ExportedProgram]) -> None:
    """Empty the list of example inputs in each program. Otherwise there is a reference cycle: the list refers
    to an input, the input to its symbolic sizes in C++, and a size refers to the list."""
    for program in programs:
        for value in [node.meta.get("val") for node in program.graph.nodes]:
            environment = getattr(getattr(value, "fake_mode", None), "shape_env", None) if isinstance(value, Tensor) else None
            if environment is not None:
                environment.tracked_fakes = []


def _empty_caches() -> None:
    """Empty the caches of torch that keep the last trace."""
    getattr(import_module("torch.fx.experimental.proxy_tensor"), "_FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT", {}).clear()
    for method in vars(import_module("torch.fx.experimental.symbolic_shapes").ShapeEnv).values():
        if hasattr(method, "cache_clear"):
            method.cache_clear()
