"""Compare time, memory and accuracy of quark and other programs. Each program has an environment of its own.

    python -m benchmarks.peers MODEL TEXT_DIR [--auto-round PYTHON] [--llm-compressor PYTHON] [--amd-quark
                               PYTHON] [--runs gptq/int4_wo_64,autoround/int3_wo_64,…] [--programs
                               quark,auto-round] [--limit 900] [--out FILE]

A run is ALGORITHM/SCHEME. Each program that has the algorithm runs it in float32 with the program's default
settings, on the tokens of `benchmarks.calibrated`. The token embedding and ``lm_head`` stay in float; every
other linear layer is quantized. The scripts in `peer_programs/` call each program's public API, and all
measure with the same code. quark and AMD Quark have the same API, so they share a script. The floor is the
CPU time of a forward pass over the calibration tokens in the same process.

``--out`` names a file, to which the program writes each result as soon as it has it. The program skips runs
that are in the file already, so you can restart a measurement. To measure a run again, remove its row. The
documentation's tables show `docs/data/peers.json`. A program that takes longer than --limit seconds, or
fails, is reported and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.calibrated import FORWARDS
from benchmarks.peer_programs.measuring import log_probabilities
from benchmarks.results import Measurement
from quark.models.hf.loading import load_model
from quark.models.hf.tokenizer import load_tokenizer

PLACES = {"calibration": (("foldoc.txt", 200_000),), "evaluation": (("foldoc.txt", 3_500_000), ("devil.txt", 20_000))}
"""File and first character of each 8 windows of 512 tokens, as in `benchmarks.calibrated`."""
RUNS = "none/int4_wo_64,gptq/int4_wo_64"
OURS = "quark"
Row = dict[str, Any]


@attrs.frozen
class Program:
    """A program that quantizes.

    Attributes:
        script: File in `peer_programs/`.
        algorithms: The algorithms that the program has, with their names in quark.
    """

    script: str
    algorithms: tuple[str, ...]


PROGRAMS = {
    OURS: Program("amd_quark", ("none", "gptq", "awq", "awq+gptq", "awq+qronos", "awq+gptq+tuning", "qronos", "autoround")),
    "AMD Quark": Program("amd_quark", ("none", "gptq", "awq", "qronos", "autoround")),
    "llm-compressor": Program("llm_compressor", ("none", "gptq", "awq", "awq+gptq", "autoround")),
    "auto-round": Program("intel_auto_round", ("autoround",)),
}


def run(python: str, script: str, arguments: list[str], limit: float) -> Row | None:
    """Run a script, and return the figures that it prints; None if it fails or takes too long."""
    others = {name: value for name, value in os.environ.items() if python == sys.executable or name != "PYTHONPATH"}
    command = [python, str(Path(__file__).with_name("peer_programs") / f"{script}.py"), *arguments]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=limit, env=others)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        reason = (error.stderr or "")[-2000:] if isinstance(error, subprocess.CalledProcessError) else f"more than {limit:g} s"
        print(f"{python} {' '.join(arguments[1:3])}: {reason!s}", flush=True)
        return None
    result: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def windows(tokenizer: Any, path: Path, start: int) -> Tensor:
    """Return 8 windows of 512 tokens, ``[8, 512]``, from character ``start`` on.

    Each window begins with the tokenizer's start token.
    """
    text = path.read_text(encoding="utf-8", errors="replace")[start : start + 8 * 512 * 8]
    begin = torch.tensor(tokenizer("")["input_ids"], dtype=torch.int64)
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)
    rows = tokens[: 8 * (512 - len(begin))].view(8, -1)
    return torch.cat([begin.expand(8, -1), rows], dim=1)


def write_tokens(model: Path, text: Path, directory: str) -> None:
    """Write the input of all programs: the tokens, and the float model's predictions for each window."""
    tokenizer, float_model = load_tokenizer(model), load_model(model, "float32")
    tokens = {name: torch.cat([windows(tokenizer, text / file, at) for file, at in places]) for name, places in PLACES.items()}
    save_file(tokens, f"{directory}/tokens.safetensors")
    for index, row in enumerate(tokens["evaluation"]):
        save_file({"log_probabilities": log_probabilities(float_model, row)}, f"{directory}/reference-{index}.safetensors")


def main(arguments: list[str] | None = None) -> list[Measurement]:
    args = parser().parse_args(arguments)
    pythons = {OURS: sys.executable, "AMD Quark": args.amd_quark, "llm-compressor": args.llm_compressor, "auto-round": args.auto_round}
    rows = stored(args.out)["rows"] if args.out else []
    keys = [key for key in asked(args, pythons) if not any(key.items() <= row.items() for row in rows)]
    with tempfile.TemporaryDirectory() as directory:
        if keys:
            write_tokens(args.model, args.text, directory)
        for key in keys:
            python, script = pythons[key["program"]], PROGRAMS[key["program"]].script
            result = run(python, script, [str(args.model), key["algorithm"], key["scheme"], directory], args.limit)
            if result is not None:
                rows.append(key | result)
                print(json.dumps(rows[-1]), flush=True)
                if args.out:
                    keep(args.out, rows[-1])
    return measurements([row for row in rows if row["model"] == args.model.name])


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory of a float checkpoint; its name becomes the model's name in the results")
    parser.add_argument("text", type=Path)
    for name in ("auto-round", "llm-compressor", "amd-quark"):
        parser.add_argument(f"--{name}", metavar="PYTHON", help=f"interpreter of an environment with {name}")
    parser.add_argument("--runs", default=RUNS, help="ALGORITHM/SCHEME,…; algorithms joined by +, none for round-to-nearest")
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="programs to run; default: all with an interpreter")
    parser.add_argument("--limit", type=float, default=900, help="limit for one run of one program, in seconds")
    parser.add_argument("--out", type=Path, help="file of results; each result is kept at once")
    return parser


def asked(args: argparse.Namespace, pythons: Mapping[str, str | None]) -> Iterator[dict[str, str]]:
    """Yield the key of each run, for each program whose interpreter is known.

    The runs of all programs with one algorithm and scheme come before the next algorithm and scheme.
    """
    for one in args.runs.split(","):
        algorithm, scheme = one.split("/")
        for name in args.programs.split(","):
            if pythons[name] and algorithm in PROGRAMS[name].algorithms:
                yield {"model": args.model.name, "program": name, "algorithm": algorithm, "scheme": scheme}


def stored(path: Path) -> dict[str, Any]:
    """Return the contents of a file of results. If the file is missing, the result has no rows."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    return data


def keep(path: Path, row: Row) -> None:
    """Add a row to a file of results.

    The file is read again first, because another measurement may have added rows.
    """
    command = "python -m benchmarks.peers MODEL TEXT_DIR --runs RUN,… --out docs/data/peers.json"
    rows = [*stored(path)["rows"], {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}]
    path.write_text(json.dumps({"command": command, "torch": str(torch.__version__), "rows": rows}, indent=1) + "\n", encoding="utf-8")


def measurements(rows: Sequence[Row]) -> list[Measurement]:
    """Return the figures of some runs of one model. Only figures of quark have bars."""
    measured = []
    for row in rows:
        case = "{program} {version}, {algorithm}, {scheme}".format(**row)
        time, perplexity = bars(row, rows)
        measured += [
            Measurement("programs side by side: time", case, row["cpu"] / row["forward_cpu"], "×", "one float forward, same process", time),
            Measurement("programs side by side: perplexity", case, row["perplexity"], "perplexity", "the same tokens", perplexity),
        ]
    return measured


def bars(row: Row, rows: Sequence[Row]) -> tuple[float | None, float | None]:
    """Return the bars of a run's time and perplexity; None means no bar.

    The time is in units of a forward pass. For tuning, the bars are a fifth of auto-round's time, and
    auto-round's perplexity.
    """
    if row["program"] != OURS:
        return None, None
    rival = next((r for r in rows if r["program"] == "auto-round" and r["scheme"] == row["scheme"]), None)
    if rival is None or not row["algorithm"].endswith("+tuning"):
        return FORWARDS.get(row["algorithm"]) if row["scheme"] == "int4_wo_64" else None, None
    return rival["cpu"] / rival["forward_cpu"] / 5, rival["perplexity"]


if __name__ == "__main__":
    main()
