"""Count the costs of runs in FLOPs, bytes, operations and waits. Other load on the machine does not change
these counts.

    python -m tools.costs                               # counts; exit status 1 if a count differs
    python -m tools.costs record [NAME ...]             # writes the counts; a higher cost needs --why
    python -m tools.costs parts NAME ...                # where the FLOPs and bytes of a run go

`tests/test_costs.py` fails if a run's counts differ from the recorded ones.
"""

from __future__ import annotations

import argparse
import sys

import attrs
from rich.console import Console
from rich.table import Table

from tools.costs.recorded import differences, read, write
from tools.costs.runs import RUNS, cost_of, parts_of


def main(arguments: list[str] | None = None) -> str | None:
    """Count the costs, and show or record them. Return an error message, or None after success."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["show", "record", "parts"], nargs="?", default="show")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(RUNS)}; default: all")
    parser.add_argument("--why", help="why costs rise; the reason is stored beside the costs")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.names if name not in RUNS]:
        parser.error(f"no run is named {unknown[0]!r}: choose from {', '.join(RUNS)}")
    names = args.names or [name for name, case in RUNS.items() if case.can_be_counted]
    if uncountable := [name for name in names if not RUNS[name].can_be_counted]:
        parser.error(
            f"{', '.join(uncountable)}: Triton's interpreter counts kernels, and it is not running. Install Triton and set "
            f"TRITON_INTERPRET=1"
        )
    if args.task == "parts":
        for name in names:
            _show_parts(name)
        return None
    recorded, counted = read(), {name: cost_of(RUNS[name]) for name in names}
    for name in names:
        print(f"{name}: {counted[name]}", *differences(recorded.get(name), counted[name]), sep="\n    ")
    if args.task == "show":
        differ = [name for name in names if differences(recorded.get(name), counted[name])]
        return f"{', '.join(differ)}: the counts differ from the recorded ones. Find the cause, or record the counts" if differ else None
    rising = [name for name in names if any(d.is_rise for d in differences(recorded.get(name), counted[name]))]
    if rising and not args.why:
        return f"{', '.join(rising)}: the cost is higher than the recorded one. Find the cause, or record the cost with --why 'the reason'"
    write(recorded, counted, dict.fromkeys(rising, args.why))
    return None


def _show_parts(name: str) -> None:
    table = Table("phase", "module", "FLOPs ÷ forward", "bytes ÷ weights", "operations a block", title=name)
    for part in parts_of(RUNS[name]):
        table.add_row(*map(str, attrs.astuple(part)))
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
