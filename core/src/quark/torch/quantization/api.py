"""``quark.torch.quantization.api``: where older releases of AMD Quark have ModelQuantizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quark.compat.facade import Facade

if TYPE_CHECKING:
    from quark.runs import ModelQuantizer

__all__ = ["ModelQuantizer"]

_FACADE = Facade(__name__, lazy={"ModelQuantizer": "quark.runs:ModelQuantizer"})


def __getattr__(name: str) -> Any:
    return _FACADE.load(name)


def __dir__() -> list[str]:
    return _FACADE.names()
