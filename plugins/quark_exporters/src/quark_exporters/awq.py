"""The exporter, the reader and the dequantizer for AutoAWQ's layout of 4-bit weights (version ``gemm``).

A weight has O output channels and I input channels.

===========  ==============================================================================================
tensor       contents
===========  ==============================================================================================
``qweight``  int32 ``[I, O / 8]``: unsigned codes, eight in a word. `ORDER` says which code comes first
``qzeros``   int32 ``[I / group, O / 8]``: zero points, packed in the same way
``scales``   ``[I / group, O]``, float16
===========  ==============================================================================================

Source: ``vllm/model_executor/layers/quantization/auto_awq.py`` of vLLM 0.32; ``awq/utils/packing_utils.py``
of AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from quark.checkpoint import CheckpointContent, CodedLayer, ExportOptions, FloatTensor
from quark.checkpoint.layer_storage import layer_codes, meta_tensors
from quark.config.enums import ZeroPointType
from quark.config.layer import QLayerConfig
from quark.errors import CheckpointError, ConfigError, UnsupportedError
from quark.models.hf.missing_tensors import misfit
from quark.numbers import QParams, canonicalize, cast_finite
from quark_exporters.linear_layers import LinearExporter, LinearReader, coded_rows, float_names
from quark_exporters.stored_codes import (
    packed_words,
    positive_scales,
    qscheme_of,
    runs_along_rows,
    spec_of_layout,
    unpacked_words,
    weight_quantizer,
)

__all__ = ["ORDER", "SCALE_TYPES", "AwqDequantizer", "AwqExporter", "AwqReader", "AwqStorage"]


ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""For each half byte of a word, from the lowest bits on, the output channel (of eight consecutive channels)
in it.
"""
SCALE_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_PER_WORD = len(ORDER)
_SHIFT = 8
"""The number to add to signed codes to make them unsigned.

It is also the stored zero point of symmetric weights.
"""


def _scale_type(_: object, attribute: object, value: str) -> None:
    if value not in SCALE_TYPES:
        raise ConfigError(f"scale_type is {value!r}, which is not a dtype of AWQ scales. Use one of {', '.join(SCALE_TYPES)}")


@attrs.frozen
class AwqStorage:
    """The `quark.checkpoint.LayerStorage` that stores a layer as AutoAWQ does.

    Attributes:
        scale_type: Dtype in which scales are stored, as a key of `SCALE_TYPES`. When a checkpoint is read,
            its scales may have any dtype.
    """

    scale_type: str = attrs.field(default="float16", validator=_scale_type)

    def why_not(self, config: QLayerConfig, shape: tuple[int, ...]) -> str | None:
        """Return why AWQ cannot store a layer (see `quark.checkpoint.LayerStorage.why_not`)."""
        if config.input_tensors is not None:
            return "its input is quantized, but AWQ quantizes only weights"
        if config.weight is None:
            return "its weight is float"
        specs = canonicalize(config.weight)
        weight, names = specs[0], " → ".join(level.dtype.name for level in specs)
        kind = (len(specs), weight.dtype.name, bool(weight.symmetric))
        if kind not in ((1, "int4", True), (1, "uint4", False)):
            return f"AWQ stores int4 without or uint4 with zero points, not {names} {'without' if weight.symmetric else 'with'} zero points"
        if _group_size_of(config) is None:
            return f"AWQ has scales for groups of input channels, not {qscheme_of(weight)}"
        if weight.scale_format not in (None, "float32"):
            return f"AWQ stores scales as floating-point numbers, not {weight.scale_format}"
        if not weight.symmetric and weight.zero_point_type is ZeroPointType.float32:
            return "AWQ has integer zero points, not real ones (zero_point_type=float32)"
        return f"AWQ needs a multiple of {_PER_WORD} output channels, but the weight has {shape[0]}" if shape[0] % _PER_WORD else None

    def stored(self, layer: CodedLayer) -> dict[str, Tensor]:
        """Return the tensors to store for a layer (see `quark.checkpoint.LayerStorage.stored`).

        Raises:
            UnsupportedError: A scale is too large for ``scale_type``.
        """
        shift = _SHIFT if layer.codes.dtype is torch.int8 else 0
        codes = (layer.codes.to(torch.int16) + shift).to(torch.uint8)
        scale = layer.qparams.scale.reshape(len(codes), -1)
        zeros = torch.zeros_like(scale) if layer.qparams.zero_point is None else layer.qparams.zero_point.reshape(scale.shape)
        zeros = (zeros.to(torch.int16) + shift).to(torch.uint8)
        return {"qweight": _packed(codes), "qzeros": _packed(zeros), "scales": self._scales(scale).t().contiguous()}

    def _scales(self, scale: Tensor) -> Tensor:
        dtype = SCALE_TYPES[self.scale_type]
        finfo = torch.finfo(dtype)
        # If a scale were rounded to 0, all values of its group would be 0. Use the smallest positive number
        # instead.
        stored = scale.clamp(min=finfo.smallest_normal * finfo.eps).to(dtype)
        if not stored.is_meta and bool(stored.isinf().any()):
            raise UnsupportedError(
                f"a scale is {float(scale.max()):.3g}, too large for {self.scale_type}. Export with the option scale_type=bfloat16"
            )
        return stored

    def restored(self, config: QLayerConfig, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> CodedLayer:
        """Return the layer that stored tensors describe (see `quark.checkpoint.LayerStorage.restored`)."""
        quantizer = weight_quantizer(config)
        dtype = quantizer.stored_level.format.storage_dtype
        shift, scale_shape = _SHIFT if dtype is torch.int8 else 0, quantizer.granularity.scale_shape(shape)
        codes = (_unpacked(tensors["qweight"], shape[0]).to(torch.int16) - shift).to(dtype)
        scale = tensors["scales"].t().contiguous().float().reshape(scale_shape)
        if shift:
            return CodedLayer(config, codes, QParams(scale, None))
        zeros = _unpacked(tensors["qzeros"], shape[0]).to(torch.int32)
        codes, zeros, scale = positive_scales(codes, zeros, scale.reshape(zeros.shape), 4)
        return CodedLayer(config, codes, QParams(scale.reshape(scale_shape), zeros.reshape(scale_shape)))


def _group_size_of(config: QLayerConfig) -> int | None:
    """Return how many consecutive input channels of a weight share a scale.

    Return -1 if all input channels share a scale, and None if the scales have another granularity.
    """
    assert config.weight is not None
    weight = canonicalize(config.weight)[0]
    if qscheme_of(weight) == "per_channel" and weight.ch_axis in (0, -2):
        return -1
    return weight.group_size if qscheme_of(weight) == "per_group" and not runs_along_rows(weight) else None


def _packed(codes: Tensor) -> Tensor:
    """Pack 4-bit codes ``[O, n]`` into int32 words ``[n, O / 8]``, eight codes in a word."""
    return packed_words(codes.t().unflatten(1, (-1, _PER_WORD))[..., list(ORDER)].flatten(1), 4)


def _unpacked(words: Tensor, rows: int) -> Tensor:
    """Unpack int32 words ``[n, O / 8]``, eight 4-bit codes in a word, into uint8 codes ``[O, n]``."""
    back = sorted(range(_PER_WORD), key=ORDER.__getitem__)
    return unpacked_words(words, 4, rows).unflatten(1, (-1, _PER_WORD))[..., back].flatten(1).t().contiguous()


class AwqExporter(LinearExporter):
    """Writes AutoAWQ's layout (version ``gemm``). `AwqReader` reads this layout.

    Args:
        scale_type: Dtype of the stored scales: float16, bfloat16 or float32. AutoAWQ writes float16, and some
            readers require float16. Only float32 stores the scales exactly.
    """

    layout = "awq"
    caches = ()

    def __init__(self, scale_type: str = "float16") -> None:
        self.storage = AwqStorage(scale_type)

    def reasons(self, content: CheckpointContent, options: ExportOptions) -> Iterator[tuple[str, str]]:
        """Yield why the layout cannot store the model (see `CheckpointExporter.reasons`)."""
        reasons = list(super().reasons(content, options))
        yield from reasons
        sizes = {_group_size_of(config) for config in coded_rows(content.plan).values() if config.weight is not None}
        if not reasons and len(sizes) != 1:
            said = ", ".join("whole rows" if size == -1 else str(size) for size in sorted(map(int, filter(None, sizes))))
            yield "", f"it needs one group size for all layers, but the layers have {said or 'none, since nothing is quantized'}"

    def quantization_config(self, content: CheckpointContent, options: ExportOptions) -> dict[str, Any]:
        """Return the ``quantization_config`` to write (see `CheckpointExporter.quantization_config`).

        The result says that the weights have zero points, even if they are symmetric, because readers of the
        layout expect zero points.
        """
        config = next(iter(coded_rows(content.plan).values()))
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": _group_size_of(config),
            "zero_point": True,
            "modules_to_not_convert": float_names(content),
        }


class AwqReader(LinearReader):
    """Reads AutoAWQ's layout.

    If the exported weight was symmetric, the reader returns an asymmetric weight whose zero points are all
    equal.
    """

    storage = AwqStorage()

    def layers(self, block: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, QLayerConfig]:
        """Return the quantized layers of the checkpoint (see `quark.checkpoint.StorageReader.layers`)."""
        config = self.layer_config(block)
        return {name.removesuffix(".qweight"): config for name in stored if name.endswith(".qweight")}

    def layer_config(self, block: Mapping[str, Any]) -> QLayerConfig:
        """Return the quantization that ``block`` describes.

        See `quark.checkpoint.LayoutReader.layer_config`.

        Raises:
            ConfigError: The group size is invalid.
            UnsupportedError: quark cannot read this number of bits or this version of the layout.
        """
        # Files that AutoAWQ itself wrote have the names ``w_bit`` and ``q_group_size``.
        bits, size = block.get("bits", block.get("w_bit", 4)), block.get("group_size", block.get("q_group_size", 128))
        version = str(block.get("version") or block.get("format") or "gemm").lower()
        has_zeros = block.get("zero_point") is not False
        if bits != 4 or version != "gemm" or not has_zeros:
            raise UnsupportedError(
                f"this AWQ checkpoint has bits={bits!r}, version={version!r} and {'' if has_zeros else 'no '}zero points. quark reads "
                f"only 4 bits, version 'gemm', with zero points"
            )
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
            raise ConfigError(f"quantization_config says group_size={size!r}. Write a positive integer or -1")
        settings: dict[str, Any] = {"symmetric": False, "zero_point_type": "int32"}
        if size == -1:
            return QLayerConfig(weight=spec_of_layout("uint4", "per_channel", ch_axis=0, **settings))
        return QLayerConfig(weight=spec_of_layout("uint4", "per_group", ch_axis=-1, group_size=size, **settings))


class AwqDequantizer:
    """The `quark.checkpoint.Dequantizer` for AutoAWQ's layout."""

    def float_tensors(self, block: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Iterator[FloatTensor]:
        """Yield the float tensors of the checkpoint (see `quark.checkpoint.Dequantizer.float_tensors`)."""
        config = AwqReader().layer_config(block)
        for name in stored:
            if name.endswith(".qweight"):
                yield _float_tensor(name.removesuffix(".qweight"), config, stored)


def _float_tensor(layer: str, config: QLayerConfig, stored: Mapping[str, Tensor]) -> FloatTensor:
    names = {leaf: f"{layer}.{leaf}" for leaf in ("qweight", "qzeros", "scales")}
    if missing := [name for name in names.values() if name not in stored]:
        raise CheckpointError(f"the checkpoint lacks '{missing[0]}', so the layer cannot be dequantized. Download the checkpoint again")
    quantizer, storage = weight_quantizer(config), AwqStorage()
    columns, words, *_ = (*stored[names["qweight"]].shape, 0, 0)
    shape = (8 * words, columns)
    fits = quantizer.shape_error(shape) is None and stored[names["qweight"]].ndim == 2
    expected = meta_tensors(storage, config, shape) if fits else {}
    if any(leaf not in expected or misfit(stored[name], expected[leaf]) for leaf, name in names.items()):
        shapes = ", ".join(f"{leaf} {stored[name].dtype} {list(stored[name].shape)}" for leaf, name in names.items())
        size = getattr(config.weight, "group_size", None) or "whole rows"
        raise CheckpointError(f"'{layer}' has {shapes}, which do not match for groups of {size}. The checkpoint is damaged")

    (codes,) = layer_codes(layer, config, shape, storage, names)

    def make(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        coded = codes.read(tensors)
        return cast_finite(quantizer.dequantize(coded.codes, coded.qparams), dtype)

    return FloatTensor(name=f"{layer}.weight", shape=shape, sources=tuple(names.values()), make=make, layers=(codes,))
