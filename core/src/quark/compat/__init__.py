"""What AMD Quark's public import paths need beyond re-exports: names that plugins bring, and packages that are also registries."""

from __future__ import annotations

__all__: list[str] = []
