"""Record digests of the files that runs write, to show that a code change does not change the files.

    python -m tools.checkpoint_digests record FILE      # before the change
    python -m tools.checkpoint_digests compare FILE     # after it: lists differences; exit status 0 if none

Each scheme quantizes the bundled tiny model with each algorithm of `ALGORITHMS`, on four routes: in memory,
from disk to disk, killed after the first block and resumed, and by two processes. On the route in memory, the
result is written in each layout that can store it. The tool records a digest of each file, and a digest of
the report without times. Sums depend on the CPU, so run both commands on the same machine. The tool uses few
names of the packages, so that it works with older and newer sources.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ALGORITHMS: dict[str, tuple[str, ...]] = {
    "rtn": (),
    "gptq": ("gptq",),
    "awq": ("awq",),
    "awq+gptq": ("awq", "gptq"),
    "qronos": ("qronos",),
}
ONLY = {"int8": {"rotation+gptq": ("rotation", "gptq")}}
"""Further algorithms for one scheme."""
SLOW = ("onnx",)
"""Layouts that are used only with round-to-nearest, since they trace the model, which is slow."""
SAMPLES, TOKENS = 4, 64
OF_A_RUN = re.compile(r"second|time|elapsed|created|machine|memory|command|python|version|source|path|flops|phases|share_of_limit")
"""Keys of a report that differ from run to run."""


def configurations() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield the configurations: the scheme, the name of a list of algorithms, and the algorithms."""
    import quark

    for scheme in sorted(quark.schemes().names()):
        for name, algorithms in {**ALGORITHMS, **ONLY.get(scheme, {})}.items():
            yield scheme, name, algorithms


def in_a_fork(work: Callable[[], object], environment: dict[str, str] | None = None) -> int:
    """Start ``work`` in a forked process that prints nothing, and return the process id."""
    number = os.fork()
    if number:
        return number
    status = 1
    try:
        os.environ.update(environment or {})
        log = os.open(os.environ.get("DIGEST_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        work()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0) if isinstance(end.code, int | None) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def waited(*numbers: int) -> int:
    """Wait for forked processes, and return the largest of their exit statuses."""
    return max(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) for number in numbers)


def digests(directory: Path) -> dict[str, str]:
    """Return the digest of each file in a run's output directory."""
    found = {}
    for file in sorted(path for path in directory.rglob("*") if path.is_file()):
        if file.suffix == ".html" or file.name == "quark_run.json":
            continue
        data = file.read_bytes()
        if file.name == "quark_report.json":
            data = json.dumps(timeless(json.loads(data)), sort_keys=True).encode()
        found[str(file.relative_to(directory))] = hashlib.sha256(data).hexdigest()[:16]
    return found


def timeless(report: Any) -> Any:
    """Return a report without times and other values that differ from run to run."""
    if isinstance(report, dict):
        return {key: timeless(value) for key, value in report.items() if not OF_A_RUN.search(key)}
    return [timeless(one) for one in report] if isinstance(report, list) else report


def command(out: Path, scheme: str, algorithms: Sequence[str], *more: str) -> Callable[[], object]:
    """Return a function that quantizes the tiny model from disk by running ``quark quantize`` in this
    process."""
    import quark_tiny_model
    from quark_workbench.cli.main import main

    source = Path(quark_tiny_model.DIRECTORY)
    data = ["--calib", str(source / "held_out.txt"), "--num-calib", str(SAMPLES), "--seq-len", str(TOKENS)]
    named = [argument for name in algorithms for argument in ("--algorithm", name)]

    def run() -> None:
        sys.argv = ["quark", "quantize", str(source), str(out), "--scheme", scheme, *named, *data, "--deterministic", *more]
        main()

    return run


def dying(work: Callable[[], object]) -> None:
    """Run ``work``, and kill this process when the work starts the second block."""
    from quark.plugins.catalog import listening

    def hear(event: Any) -> None:
        if event.name == "block_started" and event.number == 2:
            os._exit(9)

    with listening(hear):
        work()


def in_memory(out: Path, scheme: str, algorithms: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the digests of a model that is quantized in memory, by layout. Layouts that cannot store the
    model are left out."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import quark
    import quark_tiny_model
    from quark.checkpoint.export import export_with
    from quark.errors import QuarkError
    from quark.torch import LLMTemplate, ModelQuantizer

    source = Path(quark_tiny_model.DIRECTORY)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    tokens = AutoTokenizer.from_pretrained(source)((source / "held_out.txt").read_text(), verbose=False)["input_ids"]
    data = [torch.tensor(tokens[at * TOKENS : (at + 1) * TOKENS])[None] for at in range(SAMPLES)]
    config = LLMTemplate.get("llama").get_config(scheme=scheme, algorithm=list(algorithms))
    quantized = ModelQuantizer(config).quantize_model(model, data)
    found = {}
    for layout in sorted(quark.exporters().names()):
        if layout in SLOW and algorithms:
            continue
        with contextlib.suppress(QuarkError):
            export_with(layout, quantized, out / layout)
            found[layout] = {name: digest for name, digest in digests(out / layout).items() if not name.endswith(".onnx")}
    return found


def of_one(scheme: str, algorithms: Sequence[str], root: Path) -> dict[str, Any]:
    """Return the digests of one configuration by route. If a route fails, its entry is the exit status."""
    result: dict[str, Any] = {}
    answer = root / "memory.json"
    status = waited(in_a_fork(lambda: answer.write_text(json.dumps(in_memory(root / "memory", scheme, algorithms)))))
    result["memory"] = json.loads(answer.read_text()) if status == 0 else status
    status = waited(in_a_fork(command(root / "disk", scheme, algorithms)))
    result["disk"] = digests(root / "disk") if status == 0 else status
    killed = waited(in_a_fork(lambda: dying(command(root / "resumed", scheme, algorithms, "--no-report"))))
    status = waited(in_a_fork(command(root / "resumed", scheme, algorithms, "--no-report", "--resume")))
    result["resumed"] = [killed, digests(root / "resumed") if status == 0 else status]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    work = command(root / "ranks", scheme, algorithms, "--no-report")
    status = waited(*(in_a_fork(work, {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)))
    result["ranks"] = digests(root / "ranks") if status == 0 else status
    return result


def differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """Yield the differences between two results."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from differences(before.get(key), after.get(key), f"{place}/{key}")
    elif before != after:
        yield f"{place}: {before} -> {after}"


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.checkpoint_digests", description="digests of checkpoints and reports")
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", help="a pattern of scheme/algorithms")
    options = parser.parse_args()
    with contextlib.redirect_stderr(io.StringIO()):
        import torch
        import transformers  # noqa: F401  # forks have it

        import quark.runs  # noqa: F401
    torch.set_num_threads(1)
    found = {}
    for scheme, name, algorithms in configurations():
        if options.only is None or re.search(options.only, f"{scheme}/{name}"):
            with tempfile.TemporaryDirectory() as directory:
                found[f"{scheme}/{name}"] = of_one(scheme, algorithms, Path(directory))
            print(f"{scheme}/{name}", flush=True)
    if options.action == "record":
        options.file.write_text(json.dumps(found, indent=1, sort_keys=True))
        return 0
    before = json.loads(options.file.read_text())
    different = list(differences({key: before[key] for key in found if key in before}, found))
    print(*different, f"{len(found)} configurations, {len(different)} differences", sep="\n")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
