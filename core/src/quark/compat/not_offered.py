"""Names of AMD Quark's public API behind which there is nothing here: they can be imported, and say what to use when they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from quark.errors import UnsupportedError

__all__ = ["not_offered"]


def not_offered(name: str, instead: str) -> Callable[..., Any]:
    """Return a function of that name that refuses every call.

    >>> not_offered("save_params", "use export_safetensors")()
    Traceback (most recent call last):
    quark.errors.UnsupportedError: save_params is not offered: use export_safetensors
    """

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{name} is not offered: {instead}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Refuse the call with an UnsupportedError: {instead}."
    return refuse
