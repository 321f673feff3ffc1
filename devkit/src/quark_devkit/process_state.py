"""State that all code of a process shares, such as logging, torch's defaults and classes, and changes of this
state."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import threading
import warnings
from types import FunctionType
from typing import Any

__all__ = ["changes", "shared_state"]

_PATCHED = ("quark.", "quark_workbench.", "torch.nn.", "transformers.modeling_utils", "transformers.models.llama.")
"""Prefixes of modules whose functions and methods no plugin may replace."""
_PATCHED_WHOLE = ("builtins", "io", "json", "logging", "os", "random", "torch", "torch._tensor", "transformers", "warnings")


def shared_state() -> dict[str, Any]:
    """Return the state that all code of this process shares, by name. The state of torch is included if torch
    is loaded."""
    root = logging.getLogger()
    state: dict[str, Any] = {
        "the working directory": os.getcwd(),
        "the root logger": (root.level, tuple(root.handlers), tuple(root.filters)),
        "the level below which logging is disabled": logging.root.manager.disable,
        "the warning filters": tuple(warnings.filters),
        "the function that shows warnings": warnings.showwarning,
        "the number of threads": threading.active_count(),
        "Python's random state": random.getstate(),
        "signal handlers": tuple(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)),
        "sys.excepthook or a standard stream": (sys.excepthook, sys.stdout, sys.stderr),
        "the import path": tuple(sys.path),
        "the recursion limit": sys.getrecursionlimit(),
        "the garbage collector": (gc.isenabled(), gc.get_threshold()),
        **{f"the environment variable {name}": value for name, value in os.environ.items()},
    }
    torch = sys.modules.get("torch")
    return state if torch is None else state | _of_torch(torch) | _of_loggers() | _of_modules()


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of the state that changed. New names do not count, since imports add names; only new
    environment variables count."""
    changed = [name for name, value in before.items() if name not in after or after[name] != value]
    return changed + [name for name in after if name not in before and name.startswith("the environment variable")]


def _of_torch(torch: Any) -> dict[str, Any]:
    state = {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's grad mode": torch.is_grad_enabled(),
        "torch's inference mode": torch.is_inference_mode_enabled(),
        "torch's deterministic mode": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "torch's precision of float32 matrix products": torch.get_float32_matmul_precision(),
        "torch's autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "torch's handling of subnormal numbers": not bool(torch.full((1,), 1e-40, dtype=torch.float32, device="cpu").mul(0.5)),
        "torch's random state": torch.get_rng_state().numpy().tobytes(),
        "torch's print options": repr(vars(torch._tensor_str.PRINT_OPTS)),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        state["numpy's random state"] = repr(numpy.random.get_state())
        state["numpy's handling of floating-point errors"] = repr(numpy.geterr())
    return state


def _of_loggers() -> dict[str, Any]:
    loggers = {name: one for name, one in logging.root.manager.loggerDict.items() if isinstance(one, logging.Logger)}
    return {
        f"the logger '{name}'": (one.level, one.propagate, one.disabled, tuple(one.handlers), tuple(one.filters))
        for name, one in loggers.items()
    }


def _of_modules() -> dict[str, Any]:
    """Return the functions, classes and methods of the core and of libraries, by name."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if module is None or not (name in _PATCHED_WHOLE or name.startswith(_PATCHED)):
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, FunctionType | type):
                found[f"{name}.{attribute}"] = value
            if isinstance(value, type) and value.__module__ == name:
                members = ((key, member) for key, member in list(vars(value).items()) if _is_code(member))
                found.update((f"{name}.{attribute}.{key}", member) for key, member in members)
    return found


def _is_code(member: Any) -> bool:
    return isinstance(member, FunctionType | classmethod | staticmethod | property)
