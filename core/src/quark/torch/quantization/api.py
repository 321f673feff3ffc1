"""``quark.torch.quantization.api``: where AMD Quark has ModelQuantizer and load_params."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quark.compat.facade import Facade

if TYPE_CHECKING:
    from quark.runs import ModelQuantizer
    from quark.torch.parameters import load_params

__all__ = ["ModelQuantizer", "load_params"]

_FACADE = Facade(__name__, lazy={"ModelQuantizer": "quark.runs:ModelQuantizer", "load_params": "quark.torch.parameters:load_params"})


def __getattr__(name: str) -> Any:
    return _FACADE.load(name)


def __dir__() -> list[str]:
    return _FACADE.names()
