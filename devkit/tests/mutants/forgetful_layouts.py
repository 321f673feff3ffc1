"""Layouts that lose a part of a run, or remember what they should not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import load_file, save_file
from torch import nn

from quark.checkpoint import CheckpointContent, ExportOptions, StoredConfig

from .healthy_layouts import Plain, Reader, changed_json

__all__ = ["CutsRows", "ForgetsAlgorithms", "ForgetsSingleLayers", "LeavesALambda", "RemembersPlaces", "Trains"]


class ForgetsSingleLayers(Plain):
    def named(self, out: Path) -> None:
        super().named(out)
        changed_json(out / "config.json", lambda data: data["quantization_config"].update(layer_quant_config={}))


class ForgetsAlgorithms(Plain):
    def named(self, out: Path) -> None:
        super().named(out)
        changed_json(out / "config.json", lambda data: data["quantization_config"].pop("algo_config", None))


class CutsRows(Plain):
    """Writes zeros for the rows after the last eight."""

    def named(self, out: Path) -> None:
        super().named(out)
        for path in out.glob("*.safetensors"):
            tensors = load_file(path)
            for name, tensor in tensors.items():
                if ".mlp." in name and tensor.ndim > 1:
                    tensor[len(tensor) // 8 * 8 :] = 0
            save_file(tensors, path, metadata={"format": "pt"})


class Trains(Plain):
    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        super().export(content, out, options)
        content.model.train()


class RemembersPlaces(Reader):
    """Parses the configuration of a directory once."""

    known: ClassVar[dict[Path, StoredConfig]] = {}

    def configuration(self, block: Mapping[str, Any], directory: Path) -> StoredConfig:
        if directory not in self.known:
            self.known[directory] = super().configuration(block, directory)
        return self.known[directory]


class LeavesALambda(Reader):
    def place_of(self, model: nn.Module, name: str) -> str:
        model.place_of = lambda: name
        return super().place_of(model, name)
