"""Functions of ``quark.torch`` that AMD Quark's scripts import and this project does not have, and what it has in their place."""

from __future__ import annotations

import attrs

from quark.compat.not_offered import not_offered

__all__ = [
    "RuntimeOptions",
    "disable_native_inference",
    "enable_native_inference",
    "load_params",
    "move_quantizer_to_dict",
    "save_params",
]

_NATIVE = "serve the exported checkpoint with vLLM, whose kernels are native"
save_params = not_offered("save_params", "use export_safetensors, whose checkpoint also loads in transformers and vLLM")
load_params = not_offered("load_params", "use import_model_from_safetensors on what export_safetensors has written")
enable_native_inference = not_offered("enable_native_inference", _NATIVE)
disable_native_inference = not_offered("disable_native_inference", _NATIVE)
move_quantizer_to_dict = not_offered("tensor-parallel evaluation", "evaluate the exported checkpoint with quark evaluate --backend vllm")


@attrs.define
class RuntimeOptions:
    """AMD Quark's options of native inference; `quark.runs.ModelQuantizer.freeze` takes them and ignores them.

    Attributes:
        native_linear_mode: Which native linear layer; without effect.
        use_preshuffle: Without effect.
    """

    native_linear_mode: str = "auto"
    use_preshuffle: bool = False
