"""Functions that build the model of a checkpoint without its weights.

Parameters are on the meta device, or they are allocated but not initialized.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from quark.base.torch_state import building
from quark.models.hf.internals import initialize_what_no_checkpoint_holds, kept_in_float32, without_initialization
from quark.models.hf.json_files import read_json, reading
from quark.models.hf.loading import first_dtype, torch_dtype
from quark.models.hf.model_class import ModelClass, model_class
from quark.models.hf.model_config import model_config
from quark.models.hf.quantized_source import source_layout, without_quantization

_NO_MODEL = "no model can be built from its values; correct them, or fetch the file again"


def meta_model(path: Path, dtype: torch.dtype | None = None, *, trust_remote_code: bool = False) -> nn.Module:
    """Return the float model of a checkpoint on the meta device.

    Args:
        path: Directory of the checkpoint.
        dtype: Dtype of the weights. None means the dtype in the config.
        trust_remote_code: Whether code that comes with the checkpoint is allowed to run.

    Raises:
        CheckpointError: The directory is not a checkpoint.
        ConfigError: The checkpoint is quantized, and no installed layout dequantizes it.
    """
    source_layout(path)  # refuses a quantized checkpoint that cannot be dequantized
    kind = _class_of(path, trust_remote_code=trust_remote_code)
    with building(), torch.device("meta"), reading(path / "config.json", _NO_MODEL):
        return kind.build(dtype=dtype or kind.config.dtype)


def skeleton(path: Path, dtype: str, device: torch.device, *, trust_remote_code: bool = False) -> nn.Module:
    """Return the same model as `load_model`, but without weights.

    Parameters and persistent buffers are on the meta device, with their final dtypes. Buffers that no
    checkpoint contains, such as rotary tables, are computed on ``device``. Source: ``from_pretrained`` of
    transformers 5.

    Args:
        path: Directory of the checkpoint.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"``, or ``"auto"`` for the dtype in the checkpoint.
        device: Device of the computed buffers.
        trust_remote_code: Whether code that comes with the checkpoint is allowed to run.

    Raises:
        CheckpointError: The directory is not a checkpoint.
        ConfigError: The dtype is unknown. Or the checkpoint is quantized, and no installed layout dequantizes
            it.
    """
    model_dtype = torch_dtype(dtype) or model_config(path, trust_remote_code=trust_remote_code).dtype or first_dtype(path)
    model: Any = meta_model(path, model_dtype, trust_remote_code=trust_remote_code)
    for name in kept_in_float32(model, model_dtype):
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        wide = getattr(module, leaf).detach().to(torch.float32)
        setattr(module, leaf, nn.Parameter(wide, requires_grad=False) if leaf in module._parameters else wide)
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = torch.empty_like(buffer, device=device)
    initialize_what_no_checkpoint_holds(model)
    return _with_generation_config(model, path).eval()


def empty_model(
    path: Path, attn_implementation: str | None, *, trust_remote_code: bool = False, dtype: torch.dtype | None = None
) -> nn.Module:
    """Return the float model that a config.json describes, with uninitialized weights in memory.

    If ``dtype`` is None, the weights have the dtype in the config. Buffers that no checkpoint contains, such
    as rotary tables, are computed. This function raises the same errors as `model_config`.
    """
    kind = _class_of(path, trust_remote_code=trust_remote_code)
    with building(), without_initialization(), reading(path / "config.json", _NO_MODEL):
        model = kind.build(dtype=dtype or kind.config.dtype or torch.float32, attn_implementation=attn_implementation)
    return _with_generation_config(model, path).eval()


def _with_generation_config(model: Any, path: Path) -> nn.Module:
    """Set the generation settings of ``model`` if the checkpoint has such settings. Return ``model``."""
    from transformers import GenerationConfig

    generation = path / "generation_config.json"
    if generation.is_file():
        read_json(generation)
        with reading(generation, "it is damaged; fetch it again, or remove it"):
            model.generation_config = GenerationConfig.from_pretrained(path)
    return cast(nn.Module, model)


def _class_of(path: Path, *, trust_remote_code: bool) -> ModelClass:
    """Return the model class of a checkpoint, with a config that contains no quantization."""
    config = without_quantization(model_config(path, trust_remote_code=trust_remote_code))
    return model_class(config, path / "config.json", trust_remote_code=trust_remote_code)
