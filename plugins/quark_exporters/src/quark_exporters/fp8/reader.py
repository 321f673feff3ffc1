"""Fp8Reader: checkpoints with FP8 weights in the layout of DeepSeek-V3, whoever wrote them, as quantized models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig
from quark.errors import UnsupportedError
from quark_exporters.fp8.dequantizer import block_size
from quark_exporters.fp8.storage import Fp8Storage
from quark_exporters.storage_reader import StorageReader

__all__ = ["Fp8Reader"]


class Fp8Reader(StorageReader):
    """Reads FP8 weights, as `quark.checkpoint.LayoutReader`."""

    storage = Fp8Storage()

    def layers(self, block: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, QLayerConfig]:
        """As `quark_exporters.storage_reader.StorageReader.layers`."""
        config = self.layer_config(block)
        scales = (".weight_scale", ".weight_scale_inv")
        names = [name.removesuffix(suffix) for name in stored for suffix in scales if name.endswith(suffix)]
        return dict.fromkeys((name for name in names if f"{name}.weight" in stored), config)

    def layer_config(self, block: Mapping[str, Any]) -> QLayerConfig:
        """As `quark.checkpoint.layout_reader.ReadsBlocks.layer_config`."""
        return _config(block)


def _config(block: Mapping[str, Any]) -> QLayerConfig:
    method, scheme, size = block.get("quant_method"), block.get("activation_scheme", "dynamic"), block_size(block)
    if method != "fp8" or block.get("scale_fmt") not in (None, "float") or scheme not in ("static", "dynamic"):
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
        inputs = _spec("per_group", ch_axis=-1, group_size=size[1], is_dynamic=True)
    return QLayerConfig(weight=weight, input_tensors=inputs)


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
