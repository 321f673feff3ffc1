"""The recorded costs of runs, in costs.json: read, compare, write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from tools.costs.runs import RUNS, Cost, Part, parts_of

__all__ = ["ALLOWED", "FILE", "Difference", "differences", "parts", "read", "write"]

FILE = Path(__file__).with_name("costs.json")
ALLOWED = 0.02
"""Share by which a count may differ from the recorded one."""


@attrs.frozen
class Difference:
    """A count that differs from the recorded count by more than `ALLOWED`.

    Attributes:
        unit: Field of `Cost`.
        before: The recorded count.
        now: The new count.
    """

    unit: str
    before: float
    now: float

    @property
    def is_rise(self) -> bool:
        """Whether the run has become more expensive."""
        return self.now > self.before

    def __str__(self) -> str:
        """Return both counts."""
        return f"{self.unit}: {self.before} → {self.now}"


def differences(recorded: Cost | None, counted: Cost) -> list[Difference]:
    """Return the counts that differ from the recorded counts. If nothing is recorded, the result is empty."""
    if recorded is None:
        return []
    pairs = ((unit, value, getattr(counted, unit)) for unit, value in attrs.asdict(recorded).items() if value is not None)
    return [Difference(unit, before, now) for unit, before, now in pairs if abs(now - before) > ALLOWED * before]


def read() -> dict[str, Cost]:
    """Return the recorded costs by name of the run."""
    entries = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return {name: Cost(**{field.name: entry[field.name] for field in attrs.fields(Cost)}) for name, entry in entries.items()}


def parts(name: str) -> list[Part]:
    """Return the recorded parts of the cost of a run, in descending order of bytes."""
    entry = json.loads(FILE.read_text(encoding="utf-8"))[name]
    return [Part(*values) for values in entry["parts"]]


def write(recorded: Mapping[str, Cost], counted: Mapping[str, Cost], reasons: Mapping[str, str | None]) -> None:
    """Replace the recorded costs by new counts. For costs that rise, also write the reasons.

    Earlier reasons stay in the file.
    """
    entries = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for name, cost in counted.items():
        told = entries.get(name, {}).get("rises", [])
        if name in reasons:
            told = [*told, {"from": attrs.asdict(recorded[name]), "why": reasons[name]}]
        entries[name] = attrs.asdict(cost) | {"parts": [attrs.astuple(part) for part in parts_of(RUNS[name])]}
        entries[name] |= {"rises": told} if told else {}
    lines = (f" {json.dumps(name)}: {_lines(entries[name])}" for name in RUNS if name in entries)
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _lines(entry: Mapping[str, Any]) -> str:
    """Return an entry as JSON with a line for each part."""
    rows = ",\n".join(f"   {json.dumps(part)}" for part in entry["parts"])
    rest = ", ".join(f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in entry.items() if key != "parts")
    return f'{{{rest},\n  "parts": [\n{rows}\n  ]}}'
