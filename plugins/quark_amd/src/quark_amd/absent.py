"""Modules and names of AMD Quark's public API that this project does not have.

If a program imports one of them, it gets an error whose message names a replacement.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Mapping
from types import FrameType, MappingProxyType

from quark.errors import MissingPluginError, QuarkError

__all__ = ["NotOfferedError", "refuse_absent", "refuse_absent_module"]


class NotOfferedError(QuarkError, ImportError):
    """A module or name of AMD Quark's public API is not supported. The message names its replacement."""


PAGE = "docs/how-to/from-amd-quark.md"

_PRUNING = "pruning is not supported: prune the model with another library, then quantize the result"
_QAT = "quantization-aware training is not supported: use --algorithm tuning, which tunes codes and scales on calibration data"
_DIFFUSERS = "SVDQuant and diffusion pipelines are not supported: quantize a pipeline's network like any torch module"
_TRAINED = "learned rotations are not supported: use RotationConfig with random_r1 and preset='best', which needs no training"
_OWN = "this registry does not exist: add algorithms with a plugin (docs/plugins/rounding.md, docs/plugins/transform.md)"
_TWO_BIT = "TwoBitScalar is not supported: use Dtype.int2 with the algorithm tuning"
_MIXED = "this API is not supported: use quark quantize --mixed, which chooses schemes layer by layer"
_VLLM = "vLLM's worker and online quantization are not supported: export the model and serve the export"
_INTERNAL = "it is internal to AMD Quark"

_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "quark.torch.pruning": _PRUNING,
        "quark.torch.algorithm.osscar": _PRUNING,
        "quark.torch.algorithm.depth_pruning": _PRUNING,
        "quark.torch.algorithm.qad_trainer": _QAT,
        "quark.torch.algorithm.svdquant": _DIFFUSERS,
        "quark.torch.algorithm.rotation.training": _TRAINED,
        "quark.torch.quantization.observer.tqt_observer": _QAT,
        "quark.torch.quantization.observer.lsq_observer": _QAT,
        "quark.torch.utils.diffusers": _DIFFUSERS,
        "quark.torch.utils.accelerate_helper": _INTERNAL,
        "quark.torch.utils.module_replacement": _INTERNAL,
        "quark.torch.extensions": "the Brevitas extension is not supported: use Brevitas itself",
        "quark.torch.integrations": _DIFFUSERS,
        "quark.integrations": _DIFFUSERS,
        "quark.online_quantization": _VLLM,
        "quark.contrib.mince": "the choice of calibration sets is not supported: give your own data with --calib",
        "quark.experimental.cli": "its commands are part of quark: use quark quantize --template-file with a JSON file",
        "quark.experimental.torch.mix_precision": _MIXED,
        "quark.experimental.torch.mixed_precision_planner": _MIXED,
        "quark.experimental.torch.twobitscalar": _TWO_BIT,
        "quark.experimental.torch.plugin": _VLLM,
        "quark.experimental": "its experimental parts are not supported, except AutoRound",
        "quark.onnx": "ONNX models are not quantized here: quantize the torch model, and use export_onnx",
        "quark.shapeshifter": "it is not supported",
    }
)
"""Module → replacement. The replacement is also for the submodules of the module."""
_MOVED = MappingProxyType({"quark.testing": "pip install quark-devkit, and import quark_devkit; the tiny model is quark_tiny_model"})
"""Module that was part of quark-core → its new place."""
_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "ModelPruner": _PRUNING,
        "PruningConfig": _PRUNING,
        "apply_advanced_pruning_algo": _PRUNING,
        "SVDQuantConfig": _DIFFUSERS,
        "TQTSpec": _QAT,
        "TQTObserver": _QAT,
        "LSQObserver": _QAT,
        "TQTThresholdInitMeth": _QAT,
        "get_loader": _QAT,
        "get_trainer_dataset": _QAT,
        "RotationLinear": _TRAINED,
        "TwoBitScalarConfig": _TWO_BIT,
        "ALGORITHM_REGISTRY": _OWN,
        "QuarkAlgorithm": _OWN,
        "ModelImporter": "use import_model_from_safetensors",
        "export_llama_cpp_gguf": "use export_gguf, whose types are Q4_0, Q4_1, Q8_0 and MXFP4",
        "list_llama_cpp_export_formats": "export_gguf chooses the type by the scheme: Q4_0, Q4_1, Q8_0 or MXFP4",
    }
)
"""Name in any public module → replacement."""


def refuse_absent_module(name: str) -> None:
    """Raise NotOfferedError (an ImportError) if ``name`` is an unsupported module of AMD Quark.

    Raises:
        MissingPluginError: The module is part of a distribution that is not installed.
    """
    if name in _MOVED:
        raise MissingPluginError(f"the module {name} is not part of quark-core: {_MOVED[name]}", name=name)
    for module in (name, *(name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1))):
        if module in _MODULES:
            raise NotOfferedError(f"the module {name} of AMD Quark is not here: {_MODULES[module]} ({PAGE})", name=name)


def refuse_absent(module: str, name: str) -> None:
    """Raise an error if ``name`` is in AMD Quark's public API but is not supported by this project.

    Raises:
        NotOfferedError: (an ImportError) A program imports the name.
        AttributeError: A program accesses the name in another way than by an import. For example, ``hasattr``
            then returns False.
    """
    if name in _NAMES:
        message = f"{module}.{name} of AMD Quark is not here: {_NAMES[name]} ({PAGE})"
        raise NotOfferedError(message, name=module) if _is_imported() else AttributeError(message, name=name)


def _is_imported() -> bool:
    """Return whether the innermost statement outside quark and quark_amd is ``from … import …``."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in ("quark", "quark_amd"):
        frame = frame.f_back
    return frame is not None and dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"
