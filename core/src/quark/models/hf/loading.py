"""A checkpoint's model with its weights, float or quantized, loaded by transformers.

transformers is imported inside the functions: importing this package, and with it ``quark.torch``, does not
pay for it.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from quark.base.names import folded
from quark.errors import CheckpointError
from quark.models.hf.dtype_and_device import torch_device, torch_dtype
from quark.models.hf.foreign_errors import reading
from quark.models.hf.json_files import read_json
from quark.models.hf.model_config import auto_class, model_config
from quark.models.hf.shards import check_shards, refuse_codes
from quark.models.hf.unpacking import unpack_all

__all__ = ["load_model"]


def load_model(path: Path, dtype: str = "auto", device: str = "cpu", *, trust_remote_code: bool = False) -> nn.Module:
    """Return the model of a checkpoint, float or quantized, in evaluation mode.

    Args:
        path: Checkpoint directory.
        dtype: A key of float32, bfloat16, float16; ``auto`` takes what the checkpoint says.
        device: Torch device.
        trust_remote_code: Whether code that comes with the checkpoint may run.

    Raises:
        ConfigError: An unknown dtype or device.
        CheckpointError: A shard is missing, truncated, or lies outside the directory; or weights and
            config.json do not belong together.
    """
    model_dtype = torch_dtype(dtype) or "auto"
    config = model_config(path, trust_remote_code=trust_remote_code)
    shards = check_shards(path)
    if getattr(config, "quantization_config", None) is None:
        refuse_codes(shards, path)
    target = torch_device(device)
    if (path / "generation_config.json").is_file():
        read_json(path / "generation_config.json")  # transformers reads it without bounds, and passes over a damaged one
    with reading(path, "weights and config.json do not belong together, or are damaged; fetch the checkpoint again"):
        model, report = auto_class(config).from_pretrained(
            path, dtype=model_dtype, trust_remote_code=trust_remote_code, local_files_only=True, output_loading_info=True
        )
    if missing := sorted(report["missing_keys"]):
        # transformers fills them with random numbers, and warns.
        raise CheckpointError(
            f"'{path}' lacks {len(missing)} tensor(s) of a {type(model).__name__}: {folded(sorted(missing))}. It is incomplete, or its "
            "config.json is of another model"
        )
    loaded: nn.Module = model.eval().to(target)
    unpack_all(loaded, path)
    return loaded
