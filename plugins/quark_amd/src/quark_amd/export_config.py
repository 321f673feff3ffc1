"""The configuration classes for exports in AMD Quark's public API.

`ModelExporter` accepts them. Functions that read a checkpoint accept `JsonExporterConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from quark.config.fields import checked, one_of, value_of, with_dataclass_view

__all__ = ["ExporterConfig", "JsonExporterConfig", "OnnxExporterConfig"]


@with_dataclass_view
@attrs.define(init=False)
class JsonExporterConfig:
    """The layout of a safetensors export. Checkpoints store it as the block ``export`` of
    ``quantization_config``.

    The constructor gets the whole block as keyword arguments. A later version may add keys. Keys that are
    unknown are stored in ``extra``.

    Attributes:
        weight_merge_groups: Groups of weights that share one scale, as in AMD Quark. An export cannot merge
            scales, so this field only causes a warning. Set ``shared_scale_groups`` of a `QConfig` instead.
        kv_cache_group: Patterns of the key and value projections.
        min_kv_scale: Smallest scale of the KV cache.
        weight_format: ``"real_quantized"`` to store codes, or ``"fake_quantized"`` to store rounded values.
        pack_method: Order of the eight 4-bit codes in a word: ``"reorder"`` (0 2 4 6 1 3 5 7) or ``"order"``.
        extra: Unknown keys with their values.
    """

    weight_merge_groups: list[list[str]] | None = None
    kv_cache_group: list[str] = attrs.field(factory=list)
    min_kv_scale: float = 0.0
    weight_format: str = attrs.field(default="real_quantized", validator=one_of("real_quantized", "fake_quantized"))
    pack_method: str = attrs.field(default="reorder", validator=one_of("reorder", "order"))
    extra: dict[str, Any] = attrs.field(factory=dict, eq=False, repr=False)

    def __init__(
        self,
        weight_merge_groups: Sequence[Sequence[str]] | None = None,
        kv_cache_group: Sequence[str] = (),
        min_kv_scale: float = 0.0,
        weight_format: str = "real_quantized",
        pack_method: str = "reorder",
        **extra: Any,
    ) -> None:
        values = {"weight_merge_groups": weight_merge_groups, "kv_cache_group": kv_cache_group, "extra": extra.pop("extra", {})}
        merged = value_of(values, "weight_merge_groups", list)
        groups = None if merged is None else [list(checked(g, list, "weight_merge_groups")) for g in merged]
        unknown = {**value_of(values, "extra", Mapping, {}), **extra}
        self.__attrs_init__(groups, list(value_of(values, "kv_cache_group", list, ())), min_kv_scale, weight_format, pack_method, unknown)

    def to_dict(self) -> dict[str, Any]:
        """Return the block ``export``. It has exactly the five keys that AMD Quark's readers accept."""
        return {a.name: getattr(self, a.name) for a in attrs.fields(type(self)) if a.name != "extra"}


@with_dataclass_view
@attrs.define
class OnnxExporterConfig:
    """Options of an ONNX export in AMD Quark's public API."""

    input_names: list[str] = attrs.field(factory=list)
    output_names: list[str] = attrs.field(factory=list)
    verbose: bool = False
    opset_version: int | None = None
    do_constant_folding: bool = True
    uint4_int4_flag: bool = False


@with_dataclass_view
@attrs.define
class ExporterConfig:
    """Configuration of a `ModelExporter`, with a separate configuration for each kind of file."""

    json_export_config: JsonExporterConfig = attrs.field(factory=JsonExporterConfig)
    onnx_export_config: OnnxExporterConfig | None = None
