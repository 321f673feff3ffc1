"""``quark.torch.quantization.observer.observer``: the base of observers; the observers themselves come from plugins."""

from __future__ import annotations

from typing import Any

from quark.compat.facade import Facade
from quark.quantizers.observer import Observer

ObserverBase = Observer

_FACADE = Facade(__name__, own=("ObserverBase",), plugins=True)


def __getattr__(name: str) -> Any:
    return _FACADE.load(name)


def __dir__() -> list[str]:
    return _FACADE.names()
