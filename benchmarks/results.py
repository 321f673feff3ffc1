"""A file of benchmark results.

It has the figures, the floors, the machine and the date of each run. The newest run comes last.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs


@attrs.frozen
class Measurement:
    """One figure of a run.

    Attributes:
        benchmark: Name of the benchmark.
        case: The measured case.
        value: The figure: a multiple of the floor, seconds beyond the floor, or a measure of accuracy.
        unit: ``"×"``, ``"s"``, ``"perplexity"``, ``"nats"``, or ``"GiB"``.
        floor: What the figure is compared with; it is measured in the same run.
        bar: The largest allowed figure; None if there is no bar.
    """

    benchmark: str
    case: str
    value: float
    unit: str
    floor: str
    bar: float | None = None

    @property
    def is_met(self) -> bool:
        """Whether the figure meets its bar; True without a bar."""
        return self.bar is None or self.value <= self.bar


def add_run(path: Path, measured: Sequence[Measurement]) -> None:
    """Add a run to a file of results, which is created if it is missing.

    The run has the figures, the versions of software, and the machine.
    """
    # Imported here, since the process of `benchmarks.startup` needs no torch.
    import torch

    from quark.base.version import VERSION
    from quark_workbench.report.contents import machine

    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"runs": []}
    run = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"quark": VERSION, "torch": str(torch.__version__)},
        "machine": machine("cuda" if torch.cuda.is_available() else "cpu"),
        "measurements": [attrs.asdict(one) | {"value": round(one.value, 3)} for one in measured],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"runs": [*results["runs"], run]}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
