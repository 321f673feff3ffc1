"""Busy loops. They compete for processors, like other programs on a shared machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run ``count`` busy processes during the body of the ``with`` statement.

    The body begins when all of these processes compute.

    The busy processes also end if this process ends for whatever reason.
    """
    program = "import os\nparent = os.getppid()\nprint(flush=True)\nwhile os.getppid() == parent:\n    for _ in range(100_000): pass"
    loops = [subprocess.Popen([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for loop in loops:
            assert loop.stdout is not None
            loop.stdout.readline()
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.communicate()
