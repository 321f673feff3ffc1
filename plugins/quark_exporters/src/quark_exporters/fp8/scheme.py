"""What the ``quantization_config`` of an FP8 checkpoint says: the blocks of weights that share a scale, and how a layer is quantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError, UnsupportedError

__all__ = ["block_size", "layer_config"]


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


def layer_config(block: Mapping[str, Any]) -> QLayerConfig:
    """Return how a layer with codes is quantized.

    Raises UnsupportedError where readers of the layout differ, or none reads it.
    """
    method, scheme, size = block.get("quant_method"), block.get("activation_scheme", "dynamic"), block_size(block)
    if method != "fp8" or block.get("scale_fmt") not in (None, "float", "ue8m0") or scheme not in ("static", "dynamic"):
        raise UnsupportedError(
            f"this checkpoint is of the quant_method {method!r} with activation_scheme={scheme!r}, scale_fmt={block.get('scale_fmt')!r}: "
            "it is read as a source only"
        )
    if size is not None and scheme == "static":
        raise UnsupportedError("this checkpoint has FP8 blocks and static inputs, which no reader of its layout computes")
    weight = _spec("per_tensor") if size is None else _spec("per_block", block_size=size)
    if scheme == "static":
        return QLayerConfig(weight=weight, input_tensors=_spec("per_tensor"))
    inputs = _spec("per_channel", ch_axis=1, is_dynamic=True)
    if size is not None:
        inputs = _spec("per_group", ch_axis=-1, group_size=size[1], is_dynamic=True, **_UE8M0 if block.get("scale_fmt") == "ue8m0" else {})
    return QLayerConfig(weight=weight, input_tensors=inputs)


_UE8M0: dict[str, Any] = {"scale_format": "e8m0", "scale_calculation_mode": "rceil", "observer_cls": "PerBlockMXObserver"}
"""Of inputs of DeepSeek-V3.1: scales are rounded up to powers of two. Those of its weights are such numbers
in float32.
"""
_OBSERVERS = {
    "per_tensor": "PerTensorMinMaxObserver",
    "per_channel": "PerChannelMinMaxObserver",
    "per_group": "PerGroupMinMaxObserver",
    "per_block": None,
}


def _spec(qscheme: str, **more: Any) -> QTensorConfig:
    fields: dict[str, Any] = {
        "dtype": "fp8_e4m3",
        "symmetric": True,
        "is_dynamic": False,
        "scale_type": "float",
        "round_method": "half_even",
    }
    return QTensorConfig(**{**fields, "qscheme": qscheme, "observer_cls": _OBSERVERS[qscheme], **more})
