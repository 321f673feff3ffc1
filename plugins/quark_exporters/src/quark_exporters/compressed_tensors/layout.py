"""The layout of compressed-tensors, which vLLM and transformers read: its exporter and its reader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quark.checkpoint import CheckpointContent, ExportOptions
from quark.config.layer import QLayerConfig
from quark_exporters.compressed_tensors.arguments import arguments_of, format_of, layer_config, refuse_other_transforms
from quark_exporters.compressed_tensors.storage import CompressedTensorsStorage
from quark_exporters.linear_layers import Cache, LinearExporter, LinearReader, cache_of, coded_rows, float_names

__all__ = ["CACHE", "CompressedTensorsExporter", "CompressedTensorsReader"]


CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
"""Arguments of an FP8 KV cache with one scale.

With a scale per head, the strategy is ``attn_head`` instead.
"""


class CompressedTensorsExporter(LinearExporter):
    """Writes the layout of compressed-tensors. `CompressedTensorsReader` reads this layout.

    Source: compressed-tensors 0.20.
    """

    layout = "compressed_tensors"
    storage = CompressedTensorsStorage()
    caches = tuple(Cache)

    def quantization_config(self, content: CheckpointContent, options: ExportOptions) -> dict[str, Any]:
        """Implement `CheckpointExporter.quantization_config`."""
        groups: list[tuple[QLayerConfig, list[str]]] = []
        for name, config in coded_rows(content.plan).items():
            names = next((names for known, names in groups if known == config), None)
            groups.append((config, [name])) if names is None else names.append(name)
        # The target of the largest group is a layer type instead of names. Readers look for exact names
        # first, so the other groups are found.
        largest = max(range(len(groups)), key=lambda i: len(groups[i][1]), default=0)
        entries = {f"group_{i}": _group(config, ["Linear"] if i == largest else names) for i, (config, names) in enumerate(groups)}
        formats = {entry["format"] for entry in entries.values()}
        return {
            "quant_method": "compressed-tensors",
            "config_groups": entries,
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "ignore": float_names(content),
            "kv_cache_scheme": _cache(content),
            "quantization_status": "compressed",
            "global_compression_ratio": None,
        }


def _cache(content: CheckpointContent) -> dict[str, Any] | None:
    spec = next((spec for row in content.plan.attentions for _, spec in row.states.values()), None)
    return None if spec is None else CACHE | ({"strategy": "attn_head"} if cache_of(spec) is Cache.per_head else {})


def _group(config: QLayerConfig, targets: list[str]) -> dict[str, Any]:
    assert config.weight is not None
    return {
        "targets": targets,
        "weights": arguments_of(config.weight, activation=False),
        "input_activations": None if config.input_tensors is None else arguments_of(config.input_tensors, activation=True),
        "output_activations": None,
        "format": format_of(config),
    }


class CompressedTensorsReader(LinearReader):
    """Reads the layout of compressed-tensors."""

    storage = CompressedTensorsStorage()
    excluded_under = "ignore"

    def layers(self, block: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, QLayerConfig]:
        """Implement `quark.checkpoint.StorageReader.layers`."""
        refuse_other_transforms(block)
        return {name: layer_config(block, name, stored) for name in _names(stored)}


def _names(stored: Mapping[str, Any]) -> Iterator[str]:
    for name in stored:
        layer, _, leaf = name.rpartition(".")
        if leaf == "weight_packed" or (leaf == "weight" and f"{layer}.weight_scale" in stored):
            yield layer
