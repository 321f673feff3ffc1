"""What an exporter is. Third parties implement `Exporter` and register it with an `ExporterRecord`."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import attrs
from torch import nn


class Tokenizer(Protocol):
    """What an exporter asks of a tokenizer."""

    def save_pretrained(self, save_directory: str | Path, /) -> object:
        """Write its files to a directory."""


@attrs.frozen(kw_only=True)
class ExportOptions:
    """What a caller may choose.

    Attributes:
        weight_format: ``"real_quantized"`` stores codes; ``"fake_quantized"`` the rounded values, as a plain float checkpoint.
        pack_method: Order of 4-bit codes in a word: ``"reorder"`` or ``"order"``.
        kv_cache_group: Patterns of projections whose output scales are merged, beside what the model's own configuration has merged.
        min_kv_scale: Floor of the cache's scales; the larger of this and the configuration's counts.
        zero_points: Whether zero points of symmetric schemes, all 0, are written; strict readers want them.
        max_shard_bytes: Largest size of one file.
        tokenizer: Written beside the weights; anything with ``save_pretrained(directory)``. None copies the files beside the source model.
    """

    weight_format: str = "real_quantized"
    pack_method: str = "reorder"
    kv_cache_group: tuple[str, ...] = ()
    min_kv_scale: float = 0.0
    zero_points: bool = True
    max_shard_bytes: int = attrs.field(default=5_000_000_000, validator=attrs.validators.gt(0))
    tokenizer: Tokenizer | None = None


class Exporter(Protocol):
    """Writes a quantized model.

    Implementations are classes without constructor arguments. They write into a directory made by `quark.export.place.building`, so that a
    failed export leaves nothing behind.
    """

    def export(self, model: nn.Module, out: Path, options: ExportOptions) -> None:
        """Write ``model`` to the directory ``out``, which does not exist or is empty.

        Raises:
            ConfigError: The model has not been quantized.
            UnsupportedError: The exporter cannot hold this model or these options.
            OutputError: The place cannot be written.
        """
