"""Run the benchmarks that need nothing but this repository, and add what they measure to a file of results.

    python -m benchmarks [--results docs/data/benchmarks.json] [--only startup,formats] [--runs N] [--model MODEL]

With ``--model``, a float checkpoint in Hugging Face form, round-to-nearest is measured too, beside a copy of the checkpoint. The page
*Benchmarks* of the documentation is made from the file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import formats, startup
from benchmarks.results import Measurement, add_run


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="file to which the run is added")
    parser.add_argument("--only", default="startup,formats", help="of startup, formats")
    parser.add_argument("--runs", help="how often each case is timed; by default as each benchmark has it")
    parser.add_argument("--model", help="directory of a float checkpoint")
    args = parser.parse_args(arguments)
    more = ["--runs", args.runs] if args.runs else []
    mains = {"startup": startup.main, "formats": formats.main}
    measured: list[Measurement] = []
    for name in args.only.split(","):
        measured += mains[name](more)
    if args.model:
        from benchmarks import rtn

        measured += rtn.main([args.model, *more])
    if args.results:
        add_run(args.results, measured)
        print(f"Added {len(measured)} measurements to {args.results}.")


if __name__ == "__main__":
    main()
