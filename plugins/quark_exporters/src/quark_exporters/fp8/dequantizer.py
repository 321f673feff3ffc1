"""Fp8Dequantizer: FP8 weights with one scale for each tensor, row or block, such as 128 x 128 in DeepSeek-V3.

``<weight>`` in E4M3 or E5M2 has its scales in ``<weight>_scale_inv`` or ``<weight>_scale``; both multiply,
whatever the first is called. Source: checkpoints of DeepSeek-V3 and Qwen3-FP8; ``FineGrainedFP8Config`` and
``FbgemmFp8Config`` of transformers 5; vLLM's ``fp8.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from quark.checkpoint import FloatTensor, LayerCodes
from quark.checkpoint.layer_storage import layer_codes
from quark.config.layer import QLayerConfig
from quark.errors import CheckpointError, UnsupportedError
from quark_exporters.cache_scales import cache_scales
from quark_exporters.fp8.scheme import block_size, layer_config
from quark_exporters.fp8.storage import Fp8Storage, block_size_of
from quark_exporters.scale_blocks import ScaleBlocks

__all__ = ["CODES", "Fp8Dequantizer"]

CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes of FP8 codes."""
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SCALES = ("_scale_inv", "_scale")
_ACTIVATION_SCALES = ("input_scale", "input_scale_ub", "activation_scale", "output_scale")


class Fp8Dequantizer:
    """Dequantizes FP8 checkpoints, as `quark.checkpoint.Dequantizer`.

    Layers that are not quantized have no scales and stay as stored.
    """

    def float_tensors(self, block: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Iterator[FloatTensor]:
        """As `quark.checkpoint.Dequantizer.float_tensors`."""
        size, config = block_size(block), _config(block)
        for name, tensor in stored.items():
            scale = next((name + suffix for suffix in _SCALES if name + suffix in stored), None)
            if tensor.dtype in CODES and scale is not None:
                one = _float_tensor(name, scale, size, stored)
                yield one if config is None else attrs.evolve(one, layers=_layers(one, config, stored))
            elif scale is not None and scale.endswith("_inv"):
                kind = str(tensor.dtype).removeprefix("torch.")
                raise CheckpointError(f"'{name}' is stored as {kind} and has FP8 scales in '{scale}': the checkpoint is damaged")


def _config(block: Mapping[str, Any]) -> QLayerConfig | None:
    try:
        return layer_config(block)
    except UnsupportedError:
        return None  # weights are dequantized, and no layer can be written again as it is


def _layers(one: FloatTensor, config: QLayerConfig, stored: Mapping[str, Tensor]) -> tuple[LayerCodes, ...]:
    """Return how a layer can be written again; nothing where its tensors are others than its configuration says."""
    layer, (weight, scale) = one.name.removesuffix(".weight"), one.sources
    is_plain = stored[weight].dtype is CODES[0] and stored[scale].dtype in _SCALE_DTYPES and layer != one.name and len(one.shape) == 2
    has_blocks = block_size_of(config) is not None
    if not is_plain or (not has_blocks and stored[scale].numel() != 1):
        return ()
    names = {"weight": weight, "weight_scale_inv" if has_blocks else "weight_scale": scale}
    inputs = next((name for name in one.left_out if name in (f"{layer}.input_scale", f"{layer}.activation_scale")), None)
    names |= {} if inputs is None else {"input_scale": inputs}
    return layer_codes(layer, config, one.shape, Fp8Storage(), names)


def _float_tensor(name: str, scale: str, size: tuple[int, int] | None, stored: Mapping[str, Tensor]) -> FloatTensor:
    blocks = ScaleBlocks.of(name, tuple(stored[name].shape), tuple(stored[scale].shape), size)
    stem = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
    return FloatTensor(
        name=name,
        shape=tuple(stored[name].shape),
        sources=(name, scale),
        make=lambda tensors, dtype: blocks.values(tensors[name], tensors[scale], None, dtype),
        left_out=(*(stem + suffix for suffix in _ACTIVATION_SCALES if stem + suffix in stored), *cache_scales(stem[:-1], stored)),
    )
