"""``quark.torch.algorithm``: AMD Quark's package of algorithms; its modules come from plugins (see `quark.compat.plugin_modules`)."""

from __future__ import annotations

from typing import Any

from quark.compat.facade import Facade

_FACADE = Facade(__name__)


def __getattr__(name: str) -> Any:
    return _FACADE.load(name)
