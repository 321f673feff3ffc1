"""``quark.torch``: AMD Quark's public interface.

Its names are loaded on first use, as `quark.torch.import_paths` says.
"""

from __future__ import annotations

from typing import Any

from quark.torch.finder import load, public_names


def __getattr__(name: str) -> Any:
    return load(__name__, name)


def __dir__() -> list[str]:
    return public_names(__name__)
