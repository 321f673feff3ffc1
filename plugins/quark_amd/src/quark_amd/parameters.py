"""AMD Quark's functions that save a model as two files and load it again."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.base.files import represent
from quark.checkpoint.export import export_with
from quark.checkpoint.exporter import ExportOptions
from quark.checkpoint.reader import import_model_from_safetensors
from quark.config.enums import QuantizationMode
from quark.errors import CheckpointError, ConfigError, OutputError, UnsupportedError
from quark.models.hf.json_files import links_followed

__all__ = ["load_params", "save_params"]

_GRAPHS = "a model quantized in FX graph mode cannot be saved this way: use torch.export.save and torch.export.load, or export_onnx"
_NAMES = {".json": "config.json", ".safetensors": "model.safetensors"}
"""Ending of a file of `save_params` → name of the same file in a checkpoint of the Quark layout."""


def save_params(
    model: nn.Module,
    model_type: str,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    export_dir: Path | str | None = None,
    quant_mode: QuantizationMode = QuantizationMode.eager_mode,
    compressed: bool = False,
    reorder: bool = True,
) -> None:
    """Write the configuration and the tensors of a quantized model to files that `load_params` reads.

    If other programs should read the model, use `export_safetensors`.

    Args:
        model: A quantized model.
        model_type: Name of the files, such as ``"llama"``.
        args: An argument of AMD Quark for FX graph mode. It has no effect.
        kwargs: An argument of AMD Quark for FX graph mode. It has no effect.
        export_dir: Directory of the files. It is created if it does not exist. None means the system's
            directory for temporary files.
        quant_mode: The mode. It must be eager mode.
        compressed: Whether to store codes instead of rounded values.
        reorder: Whether 4-bit codes are stored in the order ``"reorder"``. If it is False, the order is
            ``"order"``.

    Raises:
        UnsupportedError: The model was quantized in FX graph mode.
        ConfigError: (a ValueError) The model is not quantized, or ``model_type`` is not a file name.
        OutputError: One of the files exists already.
    """
    if quant_mode is not QuantizationMode.eager_mode:
        raise UnsupportedError(_GRAPHS)
    if not model_type or Path(model_type).name != model_type:
        raise ConfigError(f"model_type={model_type!r} cannot be a file name. Give a name without directories, such as 'llama'")
    out = Path(tempfile.gettempdir() if export_dir is None else export_dir)
    out.mkdir(parents=True, exist_ok=True)
    targets = {name: out / f"{model_type}{suffix}" for suffix, name in _NAMES.items()}
    if used := [path for path in targets.values() if path.exists()]:
        raise OutputError(f"'{used[0]}' exists already. Choose another export_dir or model_type, or remove this file first")
    options = ExportOptions(
        weight_format="real_quantized" if compressed else "fake_quantized",
        pack_method="reorder" if reorder else "order",
        max_shard_bytes=sys.maxsize,
    )
    with tempfile.TemporaryDirectory(prefix=".save_params.", dir=out) as temporary:
        export_with("safetensors", model, Path(temporary) / "export", options)
        for name, target in targets.items():
            (Path(temporary) / "export" / name).rename(target)


def load_params(
    model: nn.Module | None = None,
    json_path: str | Path = "",
    safetensors_path: str | Path = "",
    pth_path: str | Path = "",
    quant_mode: QuantizationMode = QuantizationMode.eager_mode,
    compressed: bool = False,
    reorder: bool = True,
) -> nn.Module:
    """Fill a float model in place with the parameters that `save_params` wrote, and return the model.

    Args:
        model: A float model of the same structure.
        json_path: The file with the configuration.
        safetensors_path: The file with the tensors.
        pth_path: An argument of AMD Quark for FX graph mode. It is not supported.
        quant_mode: The mode. It must be eager mode.
        compressed: It has no effect, because the files contain this information.
        reorder: It has no effect, because the files contain this information.

    Raises:
        UnsupportedError: The arguments are for FX graph mode.
        ConfigError: (a ValueError) No model is given.
        CheckpointError: A file is missing, or `import_model_from_safetensors` raises this error.
    """
    if quant_mode is not QuantizationMode.eager_mode or pth_path:
        raise UnsupportedError(_GRAPHS)
    if model is None:
        raise ConfigError("load_params got no model. Give a float model of the same structure as the saved model")
    with tempfile.TemporaryDirectory(prefix="quark-load-params-") as temporary:
        for (suffix, name), path in zip(_NAMES.items(), (json_path, safetensors_path), strict=True):
            if not Path(path).is_file():
                raise CheckpointError(f"there is no file '{path}'. Give the path of the {suffix} file that save_params wrote")
            represent(Path(path), Path(temporary) / name)
        device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
        with links_followed():
            return import_model_from_safetensors(model, temporary, device=str(device))
