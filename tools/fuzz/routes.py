"""The routes that read a checkpoint, and the defects in their outcomes."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import torch
from safetensors import safe_open

from quark.checkpoint import import_model_from_safetensors
from quark.checkpoint.run_file import verify
from quark.errors import QuarkError
from quark_workbench.cli.main import main
from tools.fuzz.sources import FLOAT, QUANTIZED

__all__ = ["ANOTHER", "PROMISED", "REFUSED", "RESULT", "ROUTES", "ending", "judged", "run"]

ROUTES: dict[str, tuple[str, ...]] = {
    "quantize": (*FLOAT, *QUANTIZED),
    "gptq": ("float",),
    "plan": FLOAT,
    "evaluate": (*FLOAT, *QUANTIZED),
    "reader": QUANTIZED,
    "inspect": QUANTIZED,
    "verify": QUANTIZED,
    "report": QUANTIZED,
}
"""The routes and their sources."""
RESULT, REFUSED, ANOTHER = "a result", "one sentence", "another result"
PROMISED = (RESULT, REFUSED, ANOTHER)
"""The allowed outcomes.

The last is the right result for other weights. A float checkpoint may have other weights; in a quantized
checkpoint, checksums notice them.
"""


def run(route: str, directory: Path, out: Path, text: Path) -> tuple[int, str]:
    """Run a route, and return the exit code and the text on stderr.

    The parent directory of ``out`` must contain nothing but ``directory``.
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
        "inspect": ("inspect", directory),
        "verify": ("inspect", directory, "--verify"),
        "report": ("report", directory),
    }
    length = () if route in ("inspect", "verify", "report") else ("--seq-len", 32)
    before, sys.argv = sys.argv, ["quark", *map(str, (*arguments[route], *length))]
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
    """Return `RESULT`, `REFUSED`, or the defect in the outcome of a run."""
    left = sorted(p.name for p in out.parent.iterdir() if p != directory)
    if code == 0:
        return RESULT if left == ([out.name] if route in ("quantize", "gptq") else []) else f"exit code 0, but the folder has {left}"
    sentences = [line for line in said.splitlines() if line.startswith("quark: ")]
    last = "\n".join(said.splitlines()[said.splitlines().index(sentences[-1]) :]) if sentences else said.strip()
    if code != 2 or not sentences or "--debug" in last:
        return f"exit code {code}: {last}"
    unnamed = [name for name in left if not (name.endswith(".partial") and name in said)]  # a message names finished blocks
    if unnamed:
        return f"left behind {unnamed}"
    is_named = str(directory) in last or "layer" in last or "tensor(s): " in last
    return REFUSED if is_named else f"no file is named: {last}"


def judged(route: str, directory: Path, out: Path, undamaged: Path, right: Path) -> str:
    """Return `RESULT`, `ANOTHER`, or a description of damage that nothing noticed.

    Args:
        route: Route of the run, which ended in `RESULT`.
        directory: The damaged checkpoint.
        out: The output of the run.
        undamaged: The checkpoint before the damage.
        right: The output of the same run on the undamaged checkpoint.
    """
    if route == "verify":
        changed = [
            name for name in ("config.json", "model.safetensors") if (directory / name).read_bytes() != (undamaged / name).read_bytes()
        ]
        return f"not noticed: {changed}" if changed else RESULT
    if route not in ("quantize", "gptq") or _tensors(out) == _tensors(right):
        return RESULT
    with contextlib.suppress(QuarkError):
        if undamaged.name in QUANTIZED and not verify(directory).changes:
            return "not noticed: other weights, and all checksums agree"
    return ANOTHER


def _tensors(directory: Path) -> dict[str, bytes]:
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name).reshape(-1).view(torch.uint8).numpy().tobytes() for name in file.keys()}  # noqa: SIM118
    return tensors
