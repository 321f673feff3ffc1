"""The single-file layout: the box layout's names, in one safetensors file with another ending."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quark.checkpoint import CheckpointContent, Exporter, ExportOptions, ReadsOwnFiles, save_companions, stored_tensors
from quark.models.layers import QuantizedLayer
from third_party.box import METHOD, BoxExporter, BoxReader

FILE = "tensors.box"


def tensors_of(content: CheckpointContent, order: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint under its name in this layout."""
    layers = {name: module for name, module in content.model.named_modules() if isinstance(module, QuantizedLayer)}
    inside = tuple(f"{name}." for name in layers)
    seen = set()
    for name, tensor in content.model.state_dict(keep_vars=True).items():
        if not name.startswith(inside) and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()
    for name, layer in layers.items():
        assert layer.weight_quantizer is not None  # `SingleFileExporter.check` has refused other layers
        if layer.bias is not None:
            yield f"{name}.bias", layer.bias.detach()
        for suffix, tensor in stored_tensors(f"{name}.weight", layer.weight_quantizer, layer.get_parameter("weight"), order).items():
            yield f"{name}.box_{suffix or 'codes'}", tensor


def write_config(content: CheckpointContent, out: Path, order: str, **marks: str) -> None:
    """Write ``config.json``."""
    block = {**content.config.to_dict(), "quant_method": METHOD, "order": order, **marks}
    config: Any = getattr(content.model, "config", None)
    dtype = next(tensor.dtype for tensor in content.model.parameters() if tensor.is_floating_point())
    data = config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")} if config is not None else {}
    data.pop("_name_or_path", None)  # a directory of this machine
    (out / "config.json").write_text(json.dumps({**data, "quantization_config": block}), encoding="utf-8")


class SingleFileExporter(Exporter):
    """Writes the layout."""

    def check(self, content: CheckpointContent, skeleton: nn.Module, options: ExportOptions) -> None:
        BoxExporter().check(content, skeleton, options)

    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        self.check(content, content.model, options)
        save_file({name: tensor.contiguous() for name, tensor in tensors_of(content, options.pack_method)}, out / FILE)
        write_config(content, out, options.pack_method, container="box")
        save_companions(content.model, out, options.tokenizer)


class SingleFileReader(BoxReader, ReadsOwnFiles):
    """Reads it."""

    def tensors(self, directory: Path) -> Iterator[tuple[str, Tensor]]:
        yield from load_file(directory / FILE).items()
