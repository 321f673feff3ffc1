"""``quark.torch.quantization.observer.observer``: the base of observers; the observers themselves come from plugins."""

from __future__ import annotations

from typing import Any

from quark.quantizers.observer import Observer as _Observer
from quark.torch.documented import documented_name, documented_names

ObserverBase = _Observer


def __getattr__(name: str) -> Any:
    return documented_name(__name__, name, {}, plugins=True)


def __dir__() -> list[str]:
    return documented_names(__name__, {}, plugins=True)
