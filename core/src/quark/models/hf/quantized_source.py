"""Quantized checkpoints as sources: their dequantizer, and the float tensors that they stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from quark.base.log import get_logger
from quark.errors import ConfigError
from quark.models.hf.dequantizer import FloatTensor
from quark.models.hf.file_tensors import FileTensors
from quark.models.hf.json_files import config_file, naming, read_json
from quark.models.hf.shards import Shard
from quark.plugins import exporters
from quark.plugins.attribution import attributed, origin
from quark.plugins.catalog import catalog
from quark.plugins.expected import described

__all__ = ["checked_float_tensors", "float_tensors_of", "source_layout", "without_quantization"]

_KEY = "quantization_config"


def float_tensors_of(directory: Path, shards: Sequence[Shard]) -> list[FloatTensor] | None:
    """Return the float tensors that a quantized checkpoint stands for; None of a checkpoint that is float.

    Args:
        directory: The checkpoint.
        shards: Its files, from `quark.models.hf.shards.check_shards`.

    Raises:
        ConfigError, AmbiguousNameError: As `source_layout`.
        CheckpointError: Codes and scales do not fit each other.
        PluginError: The dequantizer is broken.
    """
    layout = source_layout(directory)
    if layout is None:
        return None
    name, block = layout
    with naming(directory / "config.json"):
        float_tensors = checked_float_tensors(name, block, FileTensors(shards).meta, f"'{directory}'")
    get_logger(__name__).info(
        f"'{directory}' is quantized ({block.get('quant_method')}): {len(float_tensors)} tensors are dequantized on the way in. What is "
        "rounded twice loses more than what is rounded once: where there is a float checkpoint, take that"
    )
    return float_tensors


def checked_float_tensors(name: str, block: Mapping[str, Any], stored: Mapping[str, Tensor], what: str) -> list[FloatTensor]:
    """Return the float tensors that stored ones stand for, as the dequantizer of a layout says.

    Args:
        name: Of the layout.
        block: The ``quantization_config``.
        stored: The tensors by full name, on the meta device.
        what: What they are of, for messages.

    Raises:
        CheckpointError: Codes and scales do not fit each other.
        PluginError: The dequantizer is broken.
    """
    whose, make = origin("exporters", name), exporters().load_dequantizer(name)
    with attributed(f"dequantizing {what}", whose):
        float_tensors = list(make().float_tensors(block, stored))
    for one in float_tensors:
        if not isinstance(one, FloatTensor):
            raise whose.error(f"yields {described(one)} from 'float_tensors' where a FloatTensor is expected")
    return float_tensors


def without_quantization(config: Any) -> Any:
    """Return a transformers config that says nothing of how its checkpoint is quantized.

    It is changed in place.
    """
    for part in (config, getattr(config, "text_config", None)):
        if getattr(part, _KEY, None) is not None:
            delattr(part, _KEY)
    return config


def source_layout(directory: Path) -> tuple[str, Mapping[str, Any]] | None:
    """Return the layout that dequantizes a checkpoint, and its ``quantization_config``.

    None of a float checkpoint.

    Raises:
        CheckpointError: There is no config.json, or it is damaged.
        ConfigError: No installed layout dequantizes it; the message names its method and those that can be
            read.
        AmbiguousNameError: Several do.
    """
    path = config_file(directory)
    config = read_json(path)
    with naming(path):
        block = _block(config)
    if block is None:
        return None
    name = exporters().fitting_one(block, "dequantizer", path)
    if name is None:
        raise ConfigError(
            f"'{directory}' is quantized already, by the quant_method {block.get('quant_method')!r}, which no installed layout "
            f"dequantizes; those that can be quantized anew are {exporters().methods_with('dequantizer')}. Give the float checkpoint. "
            f"{catalog().missing((exporters().kind.distribution,))}".rstrip()
        )
    return name, block


def _block(config: Any) -> Mapping[str, Any] | None:
    """Return the ``quantization_config`` of a config.json, or of the part of it that makes text."""
    parts = [config, config.get("text_config")] if isinstance(config, dict) else []
    blocks = [part[_KEY] for part in parts if isinstance(part, dict) and part.get(_KEY) is not None]
    if blocks and not isinstance(blocks[0], dict):
        raise ConfigError(f"it is {described(blocks[0])} where a table is expected")
    return blocks[0] if blocks else None
