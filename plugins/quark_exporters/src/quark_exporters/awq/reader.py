"""AwqReader: checkpoints in AutoAWQ's layout, whoever wrote them, as quantized models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError, UnsupportedError
from quark_exporters.awq.storage import AwqStorage
from quark_exporters.linear_layers import LinearReader

__all__ = ["AwqReader", "awq_config"]


class AwqReader(LinearReader):
    """Reads the layout of AutoAWQ, as `quark.checkpoint.LayoutReader`.

    Symmetric weights come back with zero points that are all alike.
    """

    storage = AwqStorage()

    def layers(self, block: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, QLayerConfig]:
        """As `quark.checkpoint.StorageReader.layers`."""
        config = self.layer_config(block)
        return {name.removesuffix(".qweight"): config for name in stored if name.endswith(".qweight")}

    def layer_config(self, block: Mapping[str, Any]) -> QLayerConfig:
        """As `quark.checkpoint.layout_reader.ReadsBlocks.layer_config`."""
        return awq_config(block)


def awq_config(block: Mapping[str, Any]) -> QLayerConfig:
    """Return how layers of a checkpoint are quantized.

    Raises:
        ConfigError: A value is of another type than it has.
        UnsupportedError: It is of a version that is not read.
    """
    # AutoAWQ's own files have other names for the same.
    bits, size = block.get("bits", block.get("w_bit", 4)), block.get("group_size", block.get("q_group_size", 128))
    version = str(block.get("version") or block.get("format") or "gemm").lower()
    has_zeros = block.get("zero_point") is not False
    if bits != 4 or version != "gemm" or not has_zeros:
        raise UnsupportedError(
            f"this checkpoint is of AWQ with bits={bits!r}, version={version!r} and {'' if has_zeros else 'no '}zero points; 4 bits in the "
            "version 'gemm' with zero points are read"
        )
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
        raise ConfigError(f"quantization_config says group_size={size!r}, and a positive number is expected, or -1")
    fields: dict[str, Any] = {"dtype": "uint4", "symmetric": False, "is_dynamic": False, "scale_type": "float", "round_method": "half_even"}
    if size == -1:
        fields |= {"qscheme": "per_channel", "ch_axis": 0, "observer_cls": "PerChannelMinMaxObserver"}
    else:
        fields |= {"qscheme": "per_group", "ch_axis": -1, "group_size": size, "observer_cls": "PerGroupMinMaxObserver"}
    return QLayerConfig(weight=QTensorConfig(**fields, zero_point_type="int32"))
