"""Progress of a run: events for plugins, a progress bar or log lines for users."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from quark.log import get_logger
from quark.plugins import Event, emit
from quark.runs.quantize_block import Progress

__all__ = ["reporting"]

_SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def reporting(samples: int) -> Iterator[Progress]:
    """Yield a progress callback: an event for plugins at each block, and a bar where stderr is a terminal, else occasional log lines.

    Args:
        samples: The number of calibration forwards of the run, for the first message.
    """
    from rich.console import Console
    from rich.progress import Progress as Bar

    log = get_logger()
    if samples:
        log.info(f"Calibrating with {samples} forward pass(es), one block at a time.")
    console = Console(file=sys.stderr)
    last = time.monotonic()
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("Quantizing", total=None)

        def report(done: int, total: int, name: str) -> None:
            nonlocal last
            emit(Event("block_finished", {"done": done, "total": total, "name": name}))
            bar.update(task, completed=done, total=total, description=f"Quantizing {name or 'model'}")
            if not console.is_terminal and time.monotonic() - last > _SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                log.info(f"Quantized {done} of {total} blocks.")

        emit(Event("run_started", {"samples": samples}))
        yield report
        emit(Event("run_finished", {}))
