"""The module ``quark.torch.utils.llm.model_preparation``. It loads models and tokenizers for AMD Quark's
scripts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.base.log import get_logger
from quark.checkpoint.companions import copy_companions
from quark.checkpoint.transformers_loading import register_layouts
from quark.errors import CheckpointError
from quark.models.hf.loading import load_model
from quark.models.hf.skeleton import meta_model
from quark.models.hf.tokenizer import load_tokenizer
from quark.runs.model_quantizer import several_devices

__all__ = [
    "available_device",
    "check_compatibility_before_quantization",
    "create_model_skeleton",
    "get_model",
    "get_model_type",
    "get_tokenizer",
    "local_checkpoint",
    "maybe_save_preprocessors",
    "prepare_for_moe_quant",
    "preprocess_for_quantization",
    "revert_model_patching",
    "save_model",
    "set_seed",
]


def available_device(device: str | torch.device | None) -> str:
    """Return the name of ``device``.

    Return "cpu" if ``device`` is None, or if ``device`` is "cuda" and the machine has no CUDA.
    """
    name = str(device or "cpu")
    return "cpu" if name.partition(":")[0] == "cuda" and not torch.cuda.is_available() else name


def local_checkpoint(name: str | Path, revision: str | None = None) -> Path:
    """Return the directory of a checkpoint. If ``name`` is not a local directory, download the checkpoint
    first.

    Raises:
        CheckpointError: ``name`` is neither a local directory nor a checkpoint that can be downloaded from
            the Hugging Face Hub. Or ``revision`` is set for a local directory.
    """
    path = Path(name)
    if path.is_dir():
        if revision is not None:
            raise CheckpointError(f"'{name}' is a local directory and has no revision '{revision}': leave the revision out")
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name), revision=revision))
    except Exception as error:  # many kinds of errors: name, network, cache
        raise CheckpointError(
            f"'{name}' is not a local directory, and loading it from the Hub failed: {type(error).__name__}: {error}"
        ) from error


def get_model(
    ckpt_path: str | Path,
    data_type: str = "auto",
    device: str = "cuda",
    multi_gpu: str | bool | None = False,
    multi_device: bool = False,
    attn_implementation: str | None = "eager",
    trust_remote_code: bool = True,
) -> tuple[nn.Module, torch.dtype]:
    """Return a model in evaluation mode, and the dtype of its weights.

    Args:
        ckpt_path: A directory, or a name on the Hugging Face Hub.
        data_type: ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"auto"``.
        device: A torch device. On a machine without CUDA, "cuda" means the CPU.
        multi_gpu: Ignored, because the model is on one device. A warning says how to use several devices.
        multi_device: The same as ``multi_gpu``.
        attn_implementation: Attention implementation of transformers. If it is None, transformers chooses
            one.
        trust_remote_code: Ignored, because code from a checkpoint is never run.

    Raises:
        CheckpointError, ConfigError: `quark.models.hf.loading.load_model` raises this error.
    """
    if multi_gpu or multi_device:
        get_logger(__name__).warning(several_devices("multi_gpu"))
    register_layouts()
    path = local_checkpoint(ckpt_path)
    model: Any = load_model(path, data_type, available_device(device))
    if attn_implementation is not None and hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation(attn_implementation)
    return model, next(model.parameters()).dtype


def get_model_type(model: nn.Module) -> str:
    """Return the model's ``config.model_type``. This is also the name of the template of the model family."""
    config: Any = model.config
    return str(config.model_type)


def get_tokenizer(ckpt_path: str | Path, max_seq_len: int = 2048, model_type: str | None = None, trust_remote_code: bool = True) -> Any:
    """Return a checkpoint's tokenizer. The tokenizer pads on the left. If it has no padding token, it pads
    with EOS.

    Args:
        ckpt_path: A directory, or a name on the Hugging Face Hub.
        max_seq_len: Ignored.
        model_type: Ignored.
        trust_remote_code: Ignored, because code from a checkpoint is never run.

    Raises:
        CheckpointError: The checkpoint has no tokenizer, or the tokenizer has neither a padding token nor an
            EOS token.
    """
    tokenizer = load_tokenizer(local_checkpoint(ckpt_path))
    if tokenizer is None:
        raise CheckpointError(f"'{ckpt_path}' has no tokenizer: copy tokenizer.json and tokenizer_config.json into it")
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise CheckpointError(
                f"the tokenizer of '{ckpt_path}' has neither a padding nor an EOS token: set one in tokenizer_config.json"
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def preprocess_for_quantization(model: nn.Module, reload: bool = False) -> None:
    """Do nothing, because `ModelQuantizer.quantize_model` splits the fused experts that it quantizes."""


def prepare_for_moe_quant(model: nn.Module, reload: bool = False) -> None:
    """Do nothing. This is the older name of `preprocess_for_quantization`."""


def revert_model_patching(model: nn.Module) -> None:
    """Do nothing, because `quark.checkpoint.export_safetensors` writes experts under their original names."""


def check_compatibility_before_quantization(model: nn.Module, raise_on_error: bool = False) -> bool:
    """Return whether a model is a float model, which can be quantized. If it is not, log a warning.

    Raises:
        CheckpointError: The model is quantized, and ``raise_on_error`` is set.
    """
    is_quantized = getattr(getattr(model, "config", None), "quantization_config", None) is not None
    if is_quantized:
        message = "this model is already quantized (its config has a quantization_config): give the float checkpoint"
        if raise_on_error:
            raise CheckpointError(message)
        get_logger(__name__).warning(message)
    return not is_quantized


def create_model_skeleton(model_dir: str | Path, trust_remote_code: bool = False, attn_implementation: str = "eager") -> nn.Module:
    """Return the model of a checkpoint on the meta device, without its weights.

    The function raises the same errors as `quark.models.hf.skeleton.meta_model`.
    """
    model: Any = meta_model(local_checkpoint(model_dir))
    model.set_attn_implementation(attn_implementation)
    return model


def save_model(model: nn.Module, tokenizer: Any, save_dir: str | Path) -> None:
    """Save a float model with transformers. Also save the tokenizer if ``tokenizer`` is not None."""
    saved: Any = model
    saved.save_pretrained(save_dir)
    if tokenizer is not None:
        tokenizer.save_pretrained(save_dir)


def maybe_save_preprocessors(
    src_name_or_path: str | Path, dest_dir: str | Path, src_subfolder: str = "", trust_remote_code: bool = False
) -> None:
    """Copy the files of a checkpoint's tokenizer and processor into a directory, if the checkpoint has them.

    Args:
        src_name_or_path: Directory of the checkpoint, or its name on the Hub.
        dest_dir: Target directory. It is created if it does not exist.
        src_subfolder: Subfolder of the checkpoint that contains the files.
        trust_remote_code: Ignored, because no code from a checkpoint is run.
    """
    directory = Path(dest_dir)
    directory.mkdir(parents=True, exist_ok=True)
    copy_companions(Path(local_checkpoint(src_name_or_path)) / src_subfolder, directory)


def set_seed(seed: int) -> None:
    """Set the seeds of Python's and torch's random numbers."""
    random.seed(seed)
    torch.manual_seed(seed)
