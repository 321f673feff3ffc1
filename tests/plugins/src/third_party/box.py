"""The box layout: safetensors files in which a layer's codes are ``NAME.box_codes`` and its scales ``NAME.box_scale``, …"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from quark.checkpoint import CheckpointContent, ExportOptions, StoredConfig, pack_model
from quark.checkpoint.destination import COMPANIONS
from quark.config.model import QConfig
from quark.config.slot import Slot
from quark.errors import UnsupportedError
from quark.hf.internals import source_of
from quark.hf.quark_loader import is_stored_beside_weight
from quark.modules import QuantizedLayer
from quark.modules.packed_layers import stored_tensors
from quark.planning.plan import QuantPlan

METHOD = "third-party-box"


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
        if layer.weight_quantizer is None or layer.input_quantizer is not None or layer.output_quantizer is not None:
            raise UnsupportedError(f"the box layout holds quantized weights and no activations: '{name}' has others")
        if layer.bias is not None:
            yield f"{name}.bias", layer.bias.detach()
        for suffix, tensor in stored_tensors(f"{name}.weight", layer.weight_quantizer, layer.weight, order).items():
            yield f"{name}.box_{suffix or 'codes'}", tensor


def write_config(content: CheckpointContent, out: Path, order: str, **marks: str) -> None:
    """Write ``config.json``."""
    block = {**content.config.to_dict(), "quant_method": METHOD, "order": order, **marks}
    config: Any = getattr(content.model, "config", None)
    dtype = next(tensor.dtype for tensor in content.model.parameters() if tensor.is_floating_point())
    data = config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")} if config is not None else {}
    (out / "config.json").write_text(json.dumps({**data, "quantization_config": block}), encoding="utf-8")


def write_companions(content: CheckpointContent, out: Path, options: ExportOptions) -> None:
    """Save the tokenizer that is passed, and copy the files that lie beside the float checkpoint."""
    if options.tokenizer is not None:
        options.tokenizer.save_pretrained(out)
    source = Path(source_of(getattr(content.model, "config", None)))
    for name in COMPANIONS:
        if source.name and (source / name).is_file() and not (out / name).exists():
            shutil.copyfile(source / name, out / name)


class BoxExporter:
    """Writes the layout."""

    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in tensors_of(content, options.pack_method)}
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        write_config(content, out, options.pack_method)
        write_companions(content, out, options)


class BoxReader:
    """Reads it, with the core's modules for packed layers."""

    renamings = ((r"\.box_codes$", ".weight"), (r"\.box_(scale_2)$", r".weight_\1"), (r"\.box_(\w+)$", r".weight_quantizer.\1"))

    def configuration(self, block: Mapping[str, Any], directory: Path) -> StoredConfig:
        return StoredConfig(config=QConfig.from_dict(block), pack_method=str(block.get("order", "reorder")))

    def prepare(self, model: nn.Module, stored: StoredConfig) -> QuantPlan:
        return pack_model(model, stored.config, stored.pack_method)

    def place_of(self, model: nn.Module, name: str) -> str:
        owner, _, suffix = name.rpartition(".box_")
        if not owner or suffix == "codes":
            return f"{owner}.weight" if owner else name
        beside = is_stored_beside_weight(suffix)
        return f"{owner}.weight_{suffix}" if beside else f"{owner}.{Slot.weight.quantizer_attribute}.{suffix}"
