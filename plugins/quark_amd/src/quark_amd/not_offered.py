"""Functions of AMD Quark's public API that this project does not have.

A program can import these functions. A call raises an error whose message names a replacement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import attrs

from quark.errors import UnsupportedError

__all__ = ["RuntimeOptions", "disable_native_inference", "enable_native_inference", "move_quantizer_to_dict", "not_offered"]


def not_offered(name: str, instead: str) -> Callable[..., Any]:
    """Return a function called ``name`` that raises an error at every call.

    >>> not_offered("save_params", "use export_safetensors")()
    Traceback (most recent call last):
    quark.errors.UnsupportedError: save_params is not supported: use export_safetensors
    """

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{name} is not supported: {instead}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Refuse the call with an UnsupportedError: {instead}."
    return refuse


_NATIVE = "serve the exported checkpoint with vLLM, whose kernels are native"
enable_native_inference = not_offered("enable_native_inference", _NATIVE)
disable_native_inference = not_offered("disable_native_inference", _NATIVE)
move_quantizer_to_dict = not_offered("tensor-parallel evaluation", "evaluate the exported checkpoint with quark evaluate --backend vllm")


@attrs.define
class RuntimeOptions:
    """Options for native inference in AMD Quark.

    `quark.runs.ModelQuantizer.freeze` accepts these options and ignores them.

    Attributes:
        native_linear_mode: The kind of native linear layer. This field has no effect.
        use_preshuffle: This field has no effect.
        svdquant_overlap_streams: This field has no effect.
    """

    native_linear_mode: str = "auto"
    use_preshuffle: bool = False
    svdquant_overlap_streams: bool = False
