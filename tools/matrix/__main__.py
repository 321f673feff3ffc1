"""Run a part of the tests with several versions of Python, torch and transformers.

    python -m tools.matrix                 # every cell
    python -m tools.matrix 3.13 5.19.0     # the cells that have one of these versions or names
    python -m tools.matrix --list

A cell is a set of versions with its own environment, which takes up to 6 GB if torch is a build for GPUs. The
program removes the environment after the tests, unless you give ``--keep``. It skips a cell if this machine
does not have the version of Python. It writes results to `docs/data/versions.json`, and `tools.docs.versions`
shows them as a table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

from tools.matrix.cells import CELLS, PACKAGES, ROOT, TESTS, Cell, Result, write
from tools.matrix.interpreters import interpreter

_VERSIONS = """
import json
from importlib.metadata import packages_distributions, version
names = ("torch", "transformers", "triton", "numpy", "safetensors", "huggingface_hub", "tokenizers")
print(json.dumps({name: version(name) for name in names if name in packages_distributions()}))
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen cells; return 1 if a test or the demo failed in any cell."""
    parser = argparse.ArgumentParser(prog="tools.matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", metavar="VERSION", help="names or versions of cells; default: all")
    parser.add_argument("--list", action="store_true", help="list the cells")
    parser.add_argument("--keep", action="store_true", help="keep the environments, .venv-matrix-NAME, and use existing ones")
    parser.add_argument("--no-results", action="store_true", help="leave docs/data/versions.json as it is")
    parser.add_argument("--if-possible", action="store_true", help="skip a cell whose torch cannot be installed")
    parser.add_argument("--few", action="store_true", help="run the same tests as `make test` does, and store no result")
    parser.add_argument("--workers", default="auto", help="number of processes that run the tests")
    args = parser.parse_args(arguments)
    chosen = [cell for cell in CELLS if not args.cells or {cell.name, *_versions(cell)} & set(args.cells)]
    if unknown := set(args.cells) - {text for cell in chosen for text in (cell.name, *_versions(cell))}:
        parser.error(f"no cell has {', '.join(sorted(unknown))}: the cells are {', '.join(cell.name for cell in CELLS)}")
    status = 0
    for cell in chosen:
        python = interpreter(cell.python)
        print(f"{cell.name}: {cell.why}, {python or f'skipped: no python{cell.python} is on PATH or in pyenv'}", flush=True)
        if args.list or python is None:
            continue
        place = ROOT / f".venv-matrix-{cell.name}"
        try:
            if not has_torch(cell, python, place) and args.if_possible:
                print(f"{cell.name}: skipped: torch {cell.torch} cannot be installed for Python {cell.python}", flush=True)
                continue
            result = run(environment(cell, place), args.workers, few=args.few)
        finally:
            if not args.keep:
                shutil.rmtree(place, ignore_errors=True)
        print(f"{cell.name}: {result}", flush=True)
        if not (args.no_results or args.few):
            write(cell.name, result)
        status |= bool(result.failed) or not result.demo
    return int(status)


def _versions(cell: Cell) -> tuple[str, str, str]:
    return cell.python, cell.torch, cell.transformers


def has_torch(cell: Cell, python: Path, place: Path) -> bool:
    """Make the environment of a cell if it is missing. Return whether torch is installed in the
    environment."""
    if (place / ".installed").is_file():
        return True
    subprocess.run([python, "-m", "venv", "--clear", place], check=True)
    pip = _pip(place)
    subprocess.run([*pip, "--upgrade", "pip"], check=True)
    return subprocess.run([*pip, f"torch=={cell.torch}"], check=False).returncode == 0


def environment(cell: Cell, place: Path) -> Path:
    """Install the packages that the tests need into a cell's environment, and return the environment's
    interpreter.

    torch must already be installed in the environment.
    """
    own, pip = place / "bin" / "python", _pip(place)
    if (place / ".installed").is_file():
        return own
    exact = [f"torch=={cell.torch}", f"transformers=={cell.transformers}", *(["-c", cell.constraints] if cell.constraints else [])]
    subprocess.run([*pip, *exact, "-r", "requirements-dev.txt"], check=True, cwd=ROOT)
    editable = [word for package in PACKAGES for word in ("-e", f"./{package}")]
    subprocess.run([*pip, *exact, "--no-build-isolation", *editable], check=True, cwd=ROOT)
    subprocess.run([own, "-m", "pip", "check"], check=True)
    (place / ".installed").touch()
    return own


def _pip(place: Path) -> list[str | Path]:
    return [place / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]


def run(python: Path, workers: str, *, few: bool = False) -> Result:
    """Run the demo, and all tests or a few tests of a cell, with the given interpreter."""
    variables = os.environ | {"OMP_NUM_THREADS": "1", "QUARK_STRICT_PLUGINS": "1"}
    versions = json.loads(subprocess.run([python, "-c", _VERSIONS], check=True, capture_output=True, text=True).stdout)
    with tempfile.TemporaryDirectory() as directory:
        demo = subprocess.run([python, "-m", "quark", "demo"], cwd=directory, env=variables, check=False, capture_output=True, text=True)
        if demo.returncode != 0:
            print(demo.stdout[-3000:], demo.stderr[-3000:], flush=True)
        report, began = Path(directory) / "report.xml", time.monotonic()
        options = ["-n", workers, f"--junitxml={report}", *(["--few"] if few else [])]
        subprocess.run([python, "-m", "pytest", *options, *TESTS], cwd=ROOT, env=variables, check=False)
        minutes = (time.monotonic() - began) / 60
        counts = next(ElementTree.parse(report).getroot().iter("testsuite")).attrib
    failed = int(counts["failures"]) + int(counts["errors"])
    passed = int(counts["tests"]) - failed - int(counts["skipped"])
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    return Result(commit, versions, demo.returncode == 0, passed, failed, int(counts["skipped"]), round(minutes, 1))


if __name__ == "__main__":
    sys.exit(main())
