"""`GptqDequantizer` computes float weights from the checkpoints of GPTQ, GPTQModel and AutoRound.

===========  ==============================================================================================
tensor       contents
===========  ==============================================================================================
``qweight``  int32 ``[I · bits / 32, O]``: the codes of a weight row, packed from the lowest bit
``qzeros``   int32 ``[groups, O · bits / 32]``: zero points, packed along ``O``. Many programs store each zero
             point minus 1 (`_offset`)
``scales``   ``[groups, O]``
``g_idx``    int32 ``[I]``: the group of each input channel. Without this tensor, consecutive channels form
             a group
===========  ==============================================================================================

In GPTQModel's form ``gptq_p``, the low and the high bits of codes and zero points with 3, 5, 6 or 7 bits are
packed apart (`planar_codes`).

A weight has O output channels and I input channels. A value is ``(code − zero point) · scale``. The number of
bits and the group size may differ between layers; quark computes both from the shapes of the tensors. Source:
``auto_round.utils.bit_packing`` and ``auto_round_extension/torch`` of AutoRound 0.16;
``gptqmodel/utils/model.py`` and ``gptqmodel/utils/planar_packing.py`` of GPTQModel 7.7.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from quark.checkpoint import CodedLayer, FloatTensor, LayerCodes
from quark.config.layer import QLayerConfig
from quark.errors import CheckpointError, ConfigError, UnsupportedError
from quark.numbers import QParams
from quark_exporters.awq import AwqDequantizer
from quark_exporters.stored_codes import ScaleBlocks, positive_scales, spec_of_layout, streamed_codes, weight_quantizer

__all__ = ["GptqDequantizer"]

_WORD = 32
_BITS = range(2, 9)
_KEPT = (2, 4, 8)
"""The numbers of bits for which quark has an unsigned format.

Only layers with these bits can keep their codes.
"""
_PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}
"""Number of bits → the widths of the parts that ``gptq_p`` packs apart, low bits first."""


class GptqDequantizer:
    """The `quark.checkpoint.Dequantizer` for checkpoints of GPTQ, GPTQModel and AutoRound."""

    def float_tensors(self, block: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Iterator[FloatTensor]:
        """Yield the float tensors of the checkpoint (see `quark.checkpoint.Dequantizer.float_tensors`)."""
        if "awq" in _packing(block):
            yield from AwqDequantizer().float_tensors({"bits": block.get("bits", 4), "group_size": _group_size(block)}, stored)
            return
        offset, size = _offset(block), _group_size(block)
        wraps, is_planar = offset > 0 and _is_of_gptqmodel(block), block.get("checkpoint_format") == "gptq_p"
        for name in stored:
            if name.endswith(".qweight"):
                layer = _Layer.of(name.removesuffix(".qweight"), stored, size, offset)
                yield attrs.evolve(layer, wraps=wraps, is_planar=is_planar).float_tensor(block.get("desc_act") is True)


def _packing(block: Mapping[str, Any]) -> str:
    """Return the packing format that AutoRound names in ``block``, such as ``"auto_round:auto_gptq"``.

    Return an empty string if another program wrote the checkpoint.
    """
    return str(block.get("packing_format", block.get("backend", ""))) if "round" in str(block.get("quant_method")) else ""


def _offset(block: Mapping[str, Any]) -> int:
    """Return the number to add to the stored zero points.

    The number is 1 in the first version of GPTQ's format, and 0 in the others.

    Raises:
        UnsupportedError: quark does not read the format that ``block`` names.
    """
    if packing := _packing(block):
        if packing.partition(":")[0] not in ("auto_round", "auto-round", "auto_gptq") or "fp8" in packing or "llm_compressor" in packing:
            raise UnsupportedError(f"quark does not read the packing_format {packing!r}. Export the checkpoint as auto_gptq")
        return int("gptq" in packing and "gptqmodel" not in packing)
    form = block.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2", "gptq_p"):
        raise UnsupportedError(f"quark does not read the checkpoint_format {form!r}. Export the checkpoint as 'gptq' or 'gptq_v2'")
    return int(form == "gptq")


def _is_of_gptqmodel(block: Mapping[str, Any]) -> bool:
    """Return whether ``block`` says that GPTQModel quantized the checkpoint."""
    meta = block.get("meta")
    programs = meta.get("quantizer") if isinstance(meta, Mapping) else None
    return any(str(program).startswith("gptqmodel:") for program in (programs if isinstance(programs, list) else [programs]))


def _group_size(block: Mapping[str, Any]) -> int:
    size = block.get("group_size", 128)
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
        raise ConfigError(f"quantization_config has group_size={size!r}, which is not a valid group size. Write a positive number or -1")
    return size


@attrs.frozen
class _Layer:
    """A quantized layer, described by the name, the shape of the weight, and the packing of the codes."""

    name: str
    shape: tuple[int, int]
    bits: int
    group_size: int
    offset: int
    has_order: bool
    wraps: bool = False
    """Whether a stored zero point wraps around, as GPTQModel stores the zero point 0 (`zero_points`)."""
    is_planar: bool = False
    """Whether the low and the high bits are packed apart (`planar_codes`)."""

    @classmethod
    def of(cls, name: str, stored: Mapping[str, Tensor], said: int, offset: int) -> _Layer:
        """Return the layer ``name`` as the stored tensors describe it.

        Raise CheckpointError if the tensors contradict each other.

        Args:
            name: Full name of the layer.
            stored: All tensors of the checkpoint, on the meta device.
            said: The group size in ``quantization_config``.
            offset: The number to add to the stored zero points.
        """
        own = {leaf: stored.get(f"{name}.{leaf}") for leaf in ("qweight", "qzeros", "scales")}
        if missing := [leaf for leaf, tensor in own.items() if tensor is None]:
            raise CheckpointError(
                f"the checkpoint lacks '{name}.{missing[0]}', so the layer cannot be dequantized. Download the checkpoint again"
            )
        shapes = {leaf: tuple(tensor.shape) for leaf, tensor in own.items() if tensor is not None}
        order = stored.get(f"{name}.g_idx")
        (words, rows), (groups, zeros), scales = (shapes[leaf] if len(shapes[leaf]) == 2 else (0, 0) for leaf in shapes)
        bits = zeros * _WORD // rows if rows else 0
        columns = words * _WORD // bits if bits in _BITS else 0
        size = _size(columns, groups, said) if order is None or order.numel() == 0 else said
        kinds = [tensor.dtype for tensor in own.values() if tensor is not None]
        fits = (
            columns > 0
            and columns % _WORD == rows % _WORD == 0
            and (columns * bits, rows * bits) == (words * _WORD, zeros * _WORD)
            and scales == (groups, rows)
            and kinds[:2] == [torch.int32] * 2
            and kinds[2].is_floating_point
            and size is not None
            and (order is None or (order.dtype, tuple(order.shape)) in ((torch.int32, (columns,)), (torch.int32, (0,))))
        )
        if not fits or size is None:
            said_shapes = ", ".join(f"{leaf} {tensor.dtype} {list(tensor.shape)}" for leaf, tensor in own.items() if tensor is not None)
            raise CheckpointError(
                f"'{name}' has {said_shapes}. These shapes do not match for groups of {said}, so the checkpoint is damaged"
            )
        return cls(name, (rows, columns), bits, size, offset, order is not None and order.numel() > 0)

    def float_tensor(self, is_reordered: bool) -> FloatTensor:
        """Return the float weight of the layer.

        If quark has a number format for the codes, and each group consists of consecutive channels, the
        result also gives access to the codes.

        Args:
            is_reordered: Whether the configuration of the checkpoint says that a group may have channels that
                are not consecutive.
        """
        leaves = ("qweight", "qzeros", "scales", *(["g_idx"] if self.has_order else []))
        names = tuple(f"{self.name}.{leaf}" for leaf in leaves)
        layers = (
            (LayerCodes(name=self.name, config=self.config(), shape=self.shape, read=self.coded),)
            if self.has_format() and not is_reordered
            else ()
        )
        return FloatTensor(name=f"{self.name}.weight", shape=self.shape, sources=names, make=self.weight, layers=layers)

    def has_format(self) -> bool:
        """Return whether quark has a number format for the codes, and all groups have the same size."""
        return self.bits in _KEPT and self.shape[1] % self.group_size == 0

    def config(self) -> QLayerConfig:
        """Return the layer configuration that describes the stored weight."""
        settings: dict[str, Any] = {"symmetric": False, "zero_point_type": "int32"}
        if self.group_size == self.shape[1]:
            return QLayerConfig(weight=spec_of_layout(f"uint{self.bits}", "per_channel", ch_axis=0, **settings))
        return QLayerConfig(weight=spec_of_layout(f"uint{self.bits}", "per_group", ch_axis=-1, group_size=self.group_size, **settings))

    def codes(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the codes ``[O, I]``, the zero points ``[O, groups]`` and the scales ``[O, groups]``."""
        codes = self.unpacked(tensors[f"{self.name}.qweight"].t().contiguous())
        zeros = self.zero_points(tensors[f"{self.name}.qzeros"]).t()
        return codes, zeros.contiguous(), tensors[f"{self.name}.scales"].t().float().contiguous()

    def zero_points(self, words: Tensor) -> Tensor:
        """Return the zero points as int32 ``[groups, O]``.

        If a number of bits divides 32, GPTQModel subtracts the offset from each 32-bit word of packed zero
        points in one subtraction. A zero point of 0 then borrows from the next one in the word, and the
        addition to the word gives both back. With 3 bits, GPTQModel subtracts modulo 8.

        Args:
            words: The packed zero points, as stored.
        """
        if not self.wraps:
            return self.unpacked(words).to(torch.int32) + self.offset
        if _WORD % self.bits:
            return (self.unpacked(words).to(torch.int32) + self.offset) & (2**self.bits - 1)
        sums = words.long() + sum(self.offset << place for place in range(0, _WORD, self.bits))
        signed = (sums + 2 ** (_WORD - 1)) % 2**_WORD - 2 ** (_WORD - 1)
        return self.unpacked(signed.to(torch.int32)).to(torch.int32)

    def unpacked(self, words: Tensor) -> Tensor:
        """Return the codes in rows of 32-bit words, as uint8."""
        return (planar_codes if self.is_planar and self.bits in _PLANES else streamed_codes)(words, self.bits)

    def weight(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the float weight.

        Raises:
            CheckpointError: A channel belongs to a group that does not exist.
        """
        codes, zeros, scales = self.codes(tensors)
        if not self.has_order:
            return ScaleBlocks(tuple(scales.shape), 1, self.group_size).values(codes, scales, zeros, dtype)
        order = tensors[f"{self.name}.g_idx"].long()
        if int(order.min()) < 0 or int(order.max()) >= scales.shape[1]:
            raise CheckpointError(
                f"'{self.name}.g_idx' names a group that does not exist: the layer has {scales.shape[1]} groups. The checkpoint is damaged"
            )
        return codes.float().sub_(zeros.float()[:, order]).mul_(scales[:, order]).to(dtype)

    def coded(self, tensors: Mapping[str, Tensor]) -> CodedLayer:
        """Return the layer with its stored codes, scales and zero points.

        Raises:
            CheckpointError: A zero point does not fit the bits of a code, or the channels of a group are not
                consecutive.
        """
        if self.has_order:
            order = tensors[f"{self.name}.g_idx"]
            if not torch.equal(order, torch.arange(self.shape[1], dtype=order.dtype, device=order.device) // self.group_size):
                raise CheckpointError(
                    f"'{self.name}.g_idx' reorders channels, but config.json says desc_act=false. Set desc_act to true in config.json"
                )
        codes, zeros, scales = positive_scales(*self.codes(tensors), self.bits)
        if bool((zeros >> self.bits).any()):
            raise CheckpointError(
                f"'{self.name}.qzeros' has the zero point {2**self.bits}, which does not fit {self.bits} bits. Dequantize the layer with "
                f"keep_prequantized_layers=False (--no-keep-prequantized)"
            )
        config = self.config()
        shape = weight_quantizer(config).granularity.scale_shape(self.shape)
        return CodedLayer(config, codes, QParams(scales.reshape(shape), zeros.reshape(shape)))


def planar_codes(words: Tensor, bits: int) -> Tensor:
    """Unpack codes whose low and high bits are packed apart, from rows of 32-bit words.

    ``bits`` words have 32 codes. The first words have the low bits of all 32 codes, packed as
    `quark_exporters.stored_codes.streamed_codes` describes, and the last words have the high bits.

    >>> planar_codes(torch.tensor([[0b01_10, 0, 0b01]], dtype=torch.int32), 3)[0, :3].tolist()
    [6, 1, 0]

    Args:
        words: int32 ``[rows, n · bits]``.
        bits: Number of bits of a code: 3, 5, 6 or 7.

    Returns:
        Codes as uint8 ``[rows, n · 32]``.
    """
    codes, place = torch.zeros((), dtype=torch.uint8, device=words.device), 0
    for part in words.unflatten(-1, (-1, bits)).split(_PLANES[bits], dim=-1):
        width = part.shape[-1]
        codes = codes | streamed_codes(part.flatten(-2), width) << place
        place += width
    return codes


def _size(columns: int, groups: int, said: int) -> int | None:
    """Return the group size: the number of consecutive columns that share a scale.

    Prefer ``said``, the group size that the checkpoint states. Return None if no group size gives ``groups``
    groups.
    """
    if groups < 1 or columns < 1:
        return None
    if groups == 1:
        return columns
    if said > 0 and -(-columns // said) == groups:
        return said
    return columns // groups if columns % groups == 0 else None
