"""The module ``quark.common.utils.log`` with AMD Quark's logger class, and the decorator that logs errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from quark.base.log import get_logger

__all__ = ["ScreenLogger", "log_errors"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
ScreenLogger = get_logger


def log_errors(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function that calls ``function``, logs the errors that it raises, and raises them again."""

    @functools.wraps(function)
    def logging(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except Exception as error:  # any error; it is raised again
            get_logger(function.__module__).error(str(error))
            raise

    return logging
