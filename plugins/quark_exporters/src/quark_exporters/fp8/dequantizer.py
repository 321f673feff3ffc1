"""Fp8Dequantizer: FP8 weights with one scale for each tensor, row or block, such as 128 x 128 in DeepSeek-V3.

``<weight>`` in E4M3 or E5M2 has its scales in ``<weight>_scale_inv`` or ``<weight>_scale``; both multiply, whatever the first is called.
Source: checkpoints of DeepSeek-V3 and Qwen3-FP8; ``FineGrainedFP8Config`` and ``FbgemmFp8Config`` of transformers 5; vLLM's ``fp8.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from quark.checkpoint import FloatTensor
from quark.errors import CheckpointError, ConfigError
from quark_exporters.cache_scales import cache_scales
from quark_exporters.scale_blocks import ScaleBlocks

__all__ = ["CODES", "Fp8Dequantizer", "block_size"]

CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes of FP8 codes."""
_SCALES = ("_scale_inv", "_scale")
_ACTIVATION_SCALES = ("input_scale", "input_scale_ub", "activation_scale", "output_scale")


class Fp8Dequantizer:
    """Dequantizes FP8 checkpoints, as `quark.checkpoint.Dequantizer`. Layers that are not quantized have no scales and stay as stored."""

    def float_tensors(self, block: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Iterator[FloatTensor]:
        """As `quark.checkpoint.Dequantizer.float_tensors`."""
        size = block_size(block)
        for name, tensor in stored.items():
            scale = next((name + suffix for suffix in _SCALES if name + suffix in stored), None)
            if tensor.dtype in CODES and scale is not None:
                yield _float_tensor(name, scale, size, stored)
            elif scale is not None and scale.endswith("_inv"):
                kind = str(tensor.dtype).removeprefix("torch.")
                raise CheckpointError(f"'{name}' is stored as {kind} and has FP8 scales in '{scale}': the checkpoint is damaged")


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


def block_size(block: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return rows and columns of the blocks that share a scale, as a ``quantization_config`` says; None where it says none.

    Raises:
        ConfigError: It says something else.
    """
    size = block.get("weight_block_size")
    if size is None:
        return None
    if not (isinstance(size, list) and len(size) == 2 and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in size)):
        raise ConfigError(f"quantization_config says weight_block_size={size!r}, and two numbers are expected, such as [128, 128]")
    return size[0], size[1]
