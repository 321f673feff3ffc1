"""Float64 throughout, so that a change that keeps a model's function can be told from rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["InFloat64"]


class InFloat64(TorchFunctionMode):
    """A context in which models compute norms, softmax and routers, for which they take float32 whatever they are given, in float64."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        named = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        function: Callable[..., Any] = Tensor.double if func is Tensor.float else func
        return function(*args, **named)
