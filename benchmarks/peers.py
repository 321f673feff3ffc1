"""The same work in other programs, each in an environment of its own: time beside one forward of the float model there, and perplexity.

    python -m benchmarks.peers MODEL TEXT_DIR [--amd-quark PYTHON] [--llm-compressor PYTHON] [--works nearest,gptq] [--limit 900]

The work is INT4 weights in groups of 64, symmetric, rounded to nearest or by GPTQ, in float32, calibrated and evaluated on the tokens of
`benchmarks.calibrated`. Each program is asked through its own public API (`peer_programs/`), with the tokens from a file: quark by the
script that asks AMD Quark, since it offers that API. Programs alternate. The floor is a forward over the calibration tokens in the same
process. A program that takes longer than --limit seconds, or fails, is reported and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.calibrated import FORWARDS
from benchmarks.perplexity import sequences
from benchmarks.results import Measurement
from quark.hf.tokenizer import load_tokenizer

PROGRAMS = Path(__file__).with_name("peer_programs")


def run(python: str, program: str, arguments: list[str], limit: float) -> dict[str, Any] | None:
    """Return what a program prints of its work; None where it fails or takes too long."""
    others = {name: value for name, value in os.environ.items() if python == sys.executable or name != "PYTHONPATH"}
    command = [python, str(PROGRAMS / f"{program}.py"), *arguments]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=limit, env=others)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        reason = (error.stderr or b"")[-1000:] if isinstance(error, subprocess.CalledProcessError) else f"more than {limit:g} s"
        print(f"{python} {' '.join(arguments[1:2])}: {reason!s}", flush=True)
        return None
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main(arguments: list[str] | None = None) -> list[Measurement]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--amd-quark", metavar="PYTHON", help="interpreter of an environment with amd-quark")
    parser.add_argument("--llm-compressor", metavar="PYTHON", help="interpreter of an environment with llmcompressor")
    parser.add_argument("--works", default="nearest,gptq")
    parser.add_argument("--limit", type=float, default=900, help="seconds that one work of one program may take")
    args = parser.parse_args(arguments)
    programs = {"quark": (sys.executable, "amd_quark"), "AMD Quark": (args.amd_quark, "amd_quark")}
    programs |= {"llm-compressor": (args.llm_compressor, "llm_compressor")}
    tokenizer, found = load_tokenizer(args.model), []
    with tempfile.TemporaryDirectory() as directory:
        tokens = {"calibration": sequences(tokenizer, args.text / "foldoc.txt", 200_000, 8, 512)}
        places = (("foldoc.txt", 3_500_000), ("devil.txt", 20_000))
        tokens["evaluation"] = torch.cat([sequences(tokenizer, args.text / f, at, 8, 512) for f, at in places])
        save_file({name: rows.contiguous() for name, rows in tokens.items()}, f"{directory}/tokens.safetensors")
        for work in args.works.split(","):
            for name, (python, program) in programs.items():
                one = run(python, program, [str(args.model), work, f"{directory}/tokens.safetensors"], args.limit) if python else None
                if one is not None:
                    print(json.dumps({"program": name, "work": work} | one), flush=True)
                    found += measurements(f"{name} {one['version']}, {work}, INT4 in groups of 64", work, name, one)
    return found


def measurements(case: str, work: str, name: str, one: dict[str, Any]) -> list[Measurement]:
    """Return the figures of one work of one program; ours are held to the bar of `benchmarks.calibrated`."""
    bar = FORWARDS.get(work) if name == "quark" else None
    return [
        Measurement("programs side by side: time", case, one["seconds"] / one["forward"], "×", "one float forward, same process", bar),
        Measurement("programs side by side: perplexity", case, one["perplexity"], "perplexity", "the same tokens"),
    ]


if __name__ == "__main__":
    main()
