"""Functions of ``quark.torch`` that AMD Quark's scripts import and this project does not have, and what it has in their place."""

from __future__ import annotations

import attrs

from quark.compat.not_offered import not_offered

__all__ = [
    "RuntimeOptions",
    "disable_native_inference",
    "enable_native_inference",
    "move_quantizer_to_dict",
]

_NATIVE = "serve the exported checkpoint with vLLM, whose kernels are native"
enable_native_inference = not_offered("enable_native_inference", _NATIVE)
disable_native_inference = not_offered("disable_native_inference", _NATIVE)
move_quantizer_to_dict = not_offered("tensor-parallel evaluation", "evaluate the exported checkpoint with quark evaluate --backend vllm")


@attrs.define
class RuntimeOptions:
    """AMD Quark's options of native inference; `quark.runs.ModelQuantizer.freeze` takes them and ignores them.

    Attributes:
        native_linear_mode: Which native linear layer; without effect.
        use_preshuffle: Without effect.
        svdquant_overlap_streams: Without effect.
    """

    native_linear_mode: str = "auto"
    use_preshuffle: bool = False
    svdquant_overlap_streams: bool = False
