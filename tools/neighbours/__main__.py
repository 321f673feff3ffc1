"""Install the wheels of this repository beside each neighbour, in fresh environments, and use both together.

    python -m tools.neighbours [NAME ...] [--wheels dist] [--folder .venv-neighbours] [--results FILE]

The environments stay in the folder. torch and torchvision must come from the same index: ``--torch-index ""``
takes both from pip's own index. ``--environment NAME=PYTHON`` uses an existing environment, which has the
neighbour but no wheel of this repository.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from tools.neighbours import CPU_TORCH, NEIGHBOURS
from tools.neighbours.environments import Environment, FailedCommandError, changes
from tools.neighbours.work import work

SHOWN = ("torch", "transformers", "compressed-tensors", "quark-core")


def main() -> int:
    """Run the command; return 1 if a step fails beside a neighbour."""
    arguments = parsed()
    arguments.folder.mkdir(exist_ok=True)
    given = dict(pair.split("=", 1) for pair in arguments.environment)
    failed = False
    for name in arguments.names:
        result = result_of(name, given.get(name), arguments)
        failed |= not is_fine(result)
        print(json.dumps({name: result}, indent=1, ensure_ascii=False), flush=True)
        if arguments.results is not None:
            add(arguments.results, name, result)
    return int(failed)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(NEIGHBOURS), metavar="NAME", help=f"any of {', '.join(NEIGHBOURS)}; default: all")
    parser.add_argument("--wheels", type=Path, default=Path("dist"))
    parser.add_argument("--folder", type=Path, default=Path(".venv-neighbours"))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--torch-index", default=CPU_TORCH)
    parser.add_argument("--environment", action="append", default=[], metavar="NAME=PYTHON")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in NEIGHBOURS]:
        parser.error(f"{', '.join(unknown)}: choose from {', '.join(NEIGHBOURS)}")
    if not list(arguments.wheels.glob("quark_core-*.whl")):
        parser.error(f"{arguments.wheels} has no wheels of quark: run `make wheels`")
    return arguments


def result_of(name: str, python: str | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the result for a neighbour: versions, the changes that our wheels make, and the result of each
    step."""
    neighbour, folder = NEIGHBOURS[name], (arguments.folder / name).absolute()
    environment = Environment(Path(python)) if python else Environment.made(folder, neighbour, arguments.torch_index)
    environment.run("-c", "import transformers; transformers.LlamaConfig")  # torchvision from another index than torch breaks this
    changed = changes(environment, neighbour, arguments.wheels.absolute())
    packages = environment.packages()
    versions = {package: packages[package] for package in (neighbour.distribution, *SHOWN) if package in packages}
    place, steps = arguments.folder.absolute() / f"{name}-work", {}
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for step, do in work(name, environment, place):
        print(f"{name}: {step}", file=sys.stderr, flush=True)
        try:
            steps[step] = do()
        except (FailedCommandError, AssertionError) as error:
            print(error, file=sys.stderr)
            steps[step] = f"failed: {str(error).splitlines()[-1]}"
    return {
        "install": f"pip {' '.join(neighbour.install())}",
        "has_that_torch": not neighbour.on_cpu or (python is None and arguments.torch_index == CPU_TORCH),
        "versions": {"Python": environment.run("-c", "import platform; print(platform.python_version())").strip(), **versions},
        "added": [package for package in changed.added if not package.startswith("quark-")],
        "changed": list(changed.changed),
        "complaints": list(changed.complaints),
        "steps": steps,
    }


def is_fine(result: dict[str, Any]) -> bool:
    """Return whether all steps succeeded and our wheels changed no package in the neighbour's environment."""
    return not (result["changed"] or result["complaints"] or any(text.startswith("failed") for text in result["steps"].values()))


def add(path: Path, name: str, result: dict[str, Any]) -> None:
    """Store a result in the file. It replaces an earlier result of the same neighbour."""
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(results | {name: result}, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
