"""The listener that writes AMD Quark's profile of every quantization run. This module does not import
torch."""

from __future__ import annotations

import os

from quark.plugins import hookimpl
from quark.plugins.events import Event, RunFailed, RunFinished, RunStarted

__all__ = ["QUARK_API", "quark_on_event"]

QUARK_API = (2, 2)

_running: list[str] = []
"""Steps of the current runs, the innermost run last."""


@hookimpl
def quark_on_event(event: Event) -> None:
    """Write the beginning and the end of a run to the profile if ``QUARK_PROFILING=1`` is set."""
    if event.task != "quantize" or os.environ.get("QUARK_PROFILING") != "1":
        return
    from amd_quark_scripts.profiler import GlobalProfiler, ProfileStep  # imported here, since it needs psutil

    if isinstance(event, RunStarted):
        _running.append(ProfileStep.MODEL_QUANTIZATION if event.out is None else ProfileStep.FILE_TO_FILE_QUANTIZATION)
        GlobalProfiler().checkpoint(f"{_running[-1]} Start")
    elif isinstance(event, RunFinished | RunFailed) and _running:
        GlobalProfiler().checkpoint(f"{_running.pop()} End")
