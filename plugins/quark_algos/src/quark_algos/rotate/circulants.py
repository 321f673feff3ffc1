"""Data: four symmetric circulants of +1 and -1 for orders of Hadamard matrices that Paley's constructions do not reach."""

from __future__ import annotations

WILLIAMSON: dict[int, tuple[str, str, str, str]] = {}
