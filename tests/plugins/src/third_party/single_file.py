"""The single-file layout: the box layout's tensors, in one safetensors file with another suffix."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quark.checkpoint import CheckpointContent, ExportOptions, ReadsOwnFiles
from third_party.box import BoxExporter, BoxReader

FILE = "tensors.box"


class SingleFileExporter(BoxExporter):
    """Writes the layout."""

    streams = resumes = shares = False

    def quantization_config(self, content: CheckpointContent, options: ExportOptions) -> dict[str, Any]:
        return {**super().quantization_config(content, options), "container": "box"}

    def announced(self, content: CheckpointContent, skeleton: nn.Module, options: ExportOptions) -> None:
        """Return None, since the layout has no safetensors files whose sizes a plan could forecast."""

    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        self.check(content, content.model, options)
        tensors = {name: tensor for part in self.parts(content.model, content.plan, options) for name, tensor in part.make().items()}
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, out / FILE)
        self.write_config(content, out, options)


class SingleFileReader(BoxReader, ReadsOwnFiles):
    """Reads it."""

    def tensors(self, directory: Path) -> Iterator[tuple[str, Tensor]]:
        yield from load_file(directory / FILE).items()
