"""AwqDequantizer: float weights of a checkpoint in AutoAWQ's layout, so that it can be quantized anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from quark.checkpoint import CodedLayer, FloatTensor
from quark.checkpoint.layer_storage import layer_codes
from quark.config.layer import QLayerConfig
from quark.errors import CheckpointError
from quark.numbers import cast_finite, quantizer_for
from quark_exporters.awq.reader import awq_config
from quark_exporters.awq.storage import AwqStorage

__all__ = ["AwqDequantizer"]

_LEAVES = ("qweight", "qzeros", "scales")


class AwqDequantizer:
    """Dequantizes AutoAWQ's layout, as `quark.checkpoint.Dequantizer`."""

    def float_tensors(self, block: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Iterator[FloatTensor]:
        """As `quark.checkpoint.Dequantizer.float_tensors`."""
        config = awq_config(block)
        for name in stored:
            if name.endswith(".qweight"):
                yield _float_tensor(name.removesuffix(".qweight"), config, stored)


def _float_tensor(layer: str, config: QLayerConfig, stored: Mapping[str, Tensor]) -> FloatTensor:
    names = {leaf: f"{layer}.{leaf}" for leaf in _LEAVES}
    if missing := [name for name in names.values() if name not in stored]:
        raise CheckpointError(f"the checkpoint has no '{missing[0]}', without which its layer cannot be dequantized: fetch it again")
    assert config.weight is not None
    quantizer, storage = quantizer_for(config.weight, activation=False), AwqStorage()
    columns, words, *_ = (*stored[names["qweight"]].shape, 0, 0)
    shape = (8 * words, columns)
    fits = quantizer.shape_error(shape) is None and stored[names["qweight"]].ndim == 2
    expected = storage.stored(CodedLayer.empty(config, shape)) if fits else {}
    if any(leaf not in expected or stored[name].shape != expected[leaf].shape for leaf, name in names.items()):
        shapes = ", ".join(f"{leaf} {list(stored[name].shape)}" for leaf, name in names.items())
        raise CheckpointError(f"'{layer}' has {shapes}, which do not fit each other in groups of {_group(config)}: it is damaged")

    (codes,) = layer_codes(layer, config, shape, storage, names)

    def make(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        coded = codes.read(tensors)
        return cast_finite(quantizer.dequantize(coded.codes, coded.qparams), dtype)

    return FloatTensor(name=f"{layer}.weight", shape=shape, sources=tuple(names.values()), make=make, layers=(codes,))


def _group(config: QLayerConfig) -> object:
    return getattr(config.weight, "group_size", None) or "whole rows"
