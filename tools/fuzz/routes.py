"""The routes by which a checkpoint is read, and the defects in the endings of their runs."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

from quark.checkpoint import import_model_from_safetensors
from quark.cli.main import main
from quark.errors import QuarkError

__all__ = ["REFUSED", "RESULT", "ROUTES", "ending", "run"]

ROUTES: dict[str, tuple[str, ...]] = {
    "quantize": ("float", "sharded"),
    "gptq": ("float",),
    "plan": ("float", "sharded"),
    "evaluate": ("float", "sharded", "quantized"),
    "reader": ("quantized",),
}
"""The routes, and the sources that each is tried on."""
RESULT, REFUSED = "a result", "one sentence"
"""The endings that are as promised."""


def run(route: str, directory: Path, out: Path, text: Path) -> tuple[int, str]:
    """Return the exit code of a route, and its text on stderr.

    ``out`` lies in a directory that holds nothing but ``directory``.
    """
    if route == "reader":
        try:
            import_model_from_safetensors(None, directory)
        except QuarkError as error:
            return 2, f"quark: {error}"
        except Exception as error:
            return 1, f"{type(error).__name__}: {error}"
        return 0, ""
    arguments: dict[str, tuple[object, ...]] = {
        "quantize": ("quantize", directory, out, "--scheme", "int4_wo_32"),
        "gptq": ("quantize", directory, out, "--scheme", "int4_wo_32", "--algorithm", "gptq", "--calib", text, "--num-calib", 1),
        "plan": ("plan", directory, "--scheme", "int4_wo_32", "--algorithm", "gptq", "--no-probe", "--num-calib", 1),
        "evaluate": ("evaluate", directory, "--text", text, "--limit", 1),
    }
    before, sys.argv = sys.argv, ["quark", *map(str, arguments[route]), "--seq-len", "32"]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            main()
    except SystemExit as done:
        return int(done.code or 0), said.getvalue()
    finally:
        sys.argv = before
    return 0, said.getvalue()


def ending(route: str, directory: Path, out: Path, code: int, said: str) -> str:
    """Return `RESULT`, `REFUSED`, or the defect in the ending of a run."""
    left = sorted(p.name for p in out.parent.iterdir() if p != directory)
    if code == 0:
        return RESULT if left == ([out.name] if route in ("quantize", "gptq") else []) else f"exit code 0, and there is {left}"
    sentences = [line for line in said.splitlines() if line.startswith("quark: ")]
    last = "\n".join(said.splitlines()[said.splitlines().index(sentences[-1]) :]) if sentences else said.strip()
    if code != 2 or not sentences or "--debug" in last:
        return f"exit code {code}: {last}"
    unnamed = [name for name in left if not (name.endswith(".partial") and name in said)]  # finished blocks stay, and it is said where
    if unnamed:
        return f"left behind {unnamed}"
    return REFUSED if str(directory) in last or "layer" in last else f"no file is named: {last}"
