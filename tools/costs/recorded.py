"""The recorded costs of runs, in costs.json: read, compare, write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import attrs

from tools.costs.runs import RUNS, Cost

__all__ = ["ALLOWED", "FILE", "Difference", "differences", "read", "write"]

FILE = Path(__file__).with_name("costs.json")
ALLOWED = 0.02
"""Share by which a count may differ from the recorded one."""


@attrs.frozen
class Difference:
    """A count that differs from the recorded one by more than `ALLOWED`.

    Attributes:
        unit: Field of `Cost`.
        before: The recorded count.
        now: The count.
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
    """Return the counts that differ from the recorded ones; none where nothing was recorded."""
    if recorded is None:
        return []
    pairs = ((unit, value, getattr(counted, unit)) for unit, value in attrs.asdict(recorded).items() if value is not None)
    return [Difference(unit, before, now) for unit, before, now in pairs if abs(now - before) > ALLOWED * before]


def read() -> dict[str, Cost]:
    """Return the recorded costs by name of the run."""
    entries = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return {name: Cost(**{field.name: entry[field.name] for field in attrs.fields(Cost)}) for name, entry in entries.items()}


def write(recorded: Mapping[str, Cost], counted: Mapping[str, Cost], reasons: Mapping[str, str | None]) -> None:
    """Write costs that were counted over those that were recorded, with the reasons for costs that rise.

    Earlier reasons stay, so that the file tells how a cost came about.
    """
    entries = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for name, cost in counted.items():
        told = entries.get(name, {}).get("rises", [])
        if name in reasons:
            told = [*told, {"from": attrs.asdict(recorded[name]), "why": reasons[name]}]
        entries[name] = attrs.asdict(cost) | ({"rises": told} if told else {})
    text = json.dumps({name: entries[name] for name in RUNS if name in entries}, indent=1, ensure_ascii=False)
    FILE.write_text(text + "\n", encoding="utf-8")
