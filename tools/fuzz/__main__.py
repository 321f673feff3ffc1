"""Damage checkpoints in many ways, run every route on each, and count the outcomes.

    python -m tools.fuzz                        # 500 damaged checkpoints, seeds 0 to 499
    python -m tools.fuzz --cases 50 --first 500 # 50 more, seeds 500 to 549
    python -m tools.fuzz --only 17 --route gptq # one, with its whole output

Three outcomes are allowed:

* The run gives the right result.
* The run gives another result, because a float checkpoint now has other weights. A quantized checkpoint may
  also have other weights, but only if its checksums show the damage.
* The run fails with exit code 2 and one sentence that names the file. It leaves only finished blocks behind,
  and a warning names their folder.

The program prints every other outcome with its seed: a traceback, files left behind, more than ten seconds of
CPU time or 2 GB, a crash. Each run has its own process. The exit status is 0 if all outcomes are allowed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import resource
import shutil
import sys
import tempfile
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

from tools.fuzz.mutations import damage
from tools.fuzz.routes import PROMISED, RESULT, ROUTES, ending, judged, run
from tools.fuzz.sources import SOURCES, TEXT, build

SECONDS, PATIENCE = 10.0, 180.0
BYTES = 2 << 30


def main() -> None:
    """Run the cases that the command line names, and print the number of cases by outcome."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", type=int, help="this seed alone")
    parser.add_argument("--route", action="append", choices=list(ROUTES))
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.cases) if options.only is None else [options.only]
    counts: dict[str, Counter[str]] = {route: Counter() for route in options.route or ROUTES}
    with tempfile.TemporaryDirectory(prefix="quark-fuzz-") as name:
        base = Path(name)
        build(base)
        for seed in seeds:
            for route, of in counts.items():
                if (source := SOURCES[seed % len(SOURCES)]) in ROUTES[route]:
                    what, kind, said = case(seed, source, route, base)
                    of[kind] += 1
                    if kind not in PROMISED or options.only is not None:
                        print(f"seed {seed}, {route} of {source}, {what}\n    {kind}: {said[:600]}", flush=True)
    kinds = sorted({kind for of in counts.values() for kind in of}, key=lambda k: (k not in PROMISED, k))
    for route, of in counts.items():
        print(f"{route:10}" + "".join(f"  {kind}: {of[kind]}" for kind in kinds))
    sys.exit(not set(kinds) <= set(PROMISED))


def case(seed: int, source: str, route: str, base: Path) -> tuple[str, str, str]:
    """Run one case. Return a description of the damage, the kind of outcome, and the defect or the run's
    message."""
    place = Path(tempfile.mkdtemp(prefix="case-", dir=base))
    directory, out = Path(shutil.copytree(base / source, place / "in")), place / "out"
    what = damage(directory, source, random.Random(seed))
    ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(route, directory, out, base / TEXT, theirs))
    process.start()
    theirs.close()
    answer = _answer(ours)
    process.join(1)
    if process.is_alive():
        process.kill()
        process.join()
        return what, "endless", f"nothing after {PATIENCE:.0f} s"
    if answer is None:
        return what, "crash", f"the process ended with {process.exitcode}"
    code, said, seconds, grown = answer
    end = ending(route, directory, out, code, said)
    if end == RESULT:
        end = judged(route, directory, out, base / source, _right(route, source, base))
    shutil.rmtree(place)
    if seconds > SECONDS:
        return what, "slow", f"{seconds:.1f} s: {end}"
    if grown > BYTES:
        return what, "much memory", f"{grown / 1e9:.1f} GB: {end}"
    kind = end if end in PROMISED else end.partition(":")[0] if "[" not in end.partition(":")[0] else "left behind"
    return what, kind, said if kind == end else end


def _right(route: str, source: str, base: Path) -> Path:
    """Return the output of a route for an undamaged source."""
    out = base / "right" / f"{route} of {source}"
    if route in ("quantize", "gptq") and not out.exists():
        code, said = run(route, base / source, out, base / TEXT)
        assert code == 0, said
    return out


def _answer(pipe: Connection) -> tuple[int, str, float, int] | None:
    """Return the message of a child process; None if the process sends nothing in time."""
    try:
        answer: tuple[int, str, float, int] | None = pipe.recv() if pipe.poll(PATIENCE) else None
    except EOFError:
        return None
    return answer


def _child(route: str, directory: Path, out: Path, text: Path, pipe: Connection) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF)
    code, said = run(route, directory, out, text)
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    pipe.send((code, said, seconds, (after.ru_maxrss - before.ru_maxrss) * 1024))


if __name__ == "__main__":
    main()
