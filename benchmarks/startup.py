"""Time a command that lists every scheme, and ``import quark.torch`` relative to ``import torch``.

    python -m benchmarks.startup [--runs 11]

Each command runs in a fresh interpreter, and the commands alternate. Their output does not go to a terminal,
because quark imports rich for a terminal. Bytecode is cached, as in an installation, even if
PYTHONDONTWRITEBYTECODE is set. The program prints medians, their ratio or difference, and the bar.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.results import Measurement

FLOOR = "import pluggy, attrs, importlib_metadata"
LISTINGS = {
    "quark.schemes().names()": ["-c", "import quark; quark.schemes().names()"],
    "quark schemes": ["-c", "from quark_workbench.cli.main import main; main()", "schemes"],
    "quark schemes --json": ["-c", "from quark_workbench.cli.main import main; main()", "schemes", "--json"],
    "quark --help": ["-c", "from quark_workbench.cli.main import main; main()", "--help"],
}
LISTING_BAR = 3.0
FACADES = {
    "import quark.torch": ["-c", "import torch, quark.torch"],
    "from quark.torch import …": ["-c", "import torch; from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors"],
}
FACADE_BAR = 0.3


def medians(commands: dict[str, list[str]], runs: int) -> dict[str, float]:
    """Return the median wall seconds of each command.

    The commands alternate, and a first run of each, which fills caches, is not measured.
    """
    taken: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as bytecode:
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environ["PYTHONPYCACHEPREFIX"] = bytecode
        for run in range(runs + 1):
            for name, arguments in commands.items():
                start = time.perf_counter()
                subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environ)
                if run:
                    taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in taken.items()}


def main(arguments: list[str] | None = None) -> list[Measurement]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=11)
    runs = parser.parse_args(arguments).runs
    found = medians({FLOOR: ["-c", FLOOR], **LISTINGS}, runs)
    print(f"{Path(sys.executable).name} {sys.version.split()[0]}, medians of {runs}; floor: {FLOOR}")
    measured = []
    for name in LISTINGS:
        ratio, held_to = found[name] / found[FLOOR], None if name == "quark --help" else LISTING_BAR
        measured.append(Measurement("start-up", name, ratio, "×", FLOOR, held_to))
        bar = f"(bar {LISTING_BAR:g}×)" if name != "quark --help" else "(no bar: it loads the command-line library)"
        print(f"{name:28s} {ratio:6.2f}× the floor   {bar}")
    found = medians({"import torch": ["-c", "import torch"], **FACADES}, max(3, runs // 2))
    for name in FACADES:
        measured.append(Measurement("start-up", name, found[name] - found["import torch"], "s", "import torch", FACADE_BAR))
        print(f"{name:28s} {found[name] - found['import torch']:+6.2f} s beyond import torch   (bar {FACADE_BAR:g} s)")
    return measured


if __name__ == "__main__":
    main()
