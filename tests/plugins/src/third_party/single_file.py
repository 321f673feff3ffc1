"""The single-file layout: the box layout's names, in one file that ``torch.save`` writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from quark.checkpoint import CheckpointContent, ExportOptions
from third_party.box import BoxReader, tensors_of, write_companions, write_config

FILE = "tensors.pt"


class SingleFileExporter:
    """Writes the layout."""

    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        torch.save(dict(tensors_of(content, options.pack_method)), out / FILE)
        write_config(content, out, options.pack_method, container="torch")
        write_companions(content, out, options)


class SingleFileReader(BoxReader):
    """Reads it: `quark.checkpoint.ReadsOwnFiles`."""

    def tensors(self, directory: Path) -> Iterator[tuple[str, Tensor]]:
        yield from torch.load(directory / FILE, weights_only=True).items()
