"""Helpers for codes and scales that checkpoints store.

They pack codes into words and bytes, find the blocks that share a scale, and make specs.

A block, whose elements share a scale, may have any number of rows and columns. The last block of an axis may
be smaller. The values of FP4 codes (E2M1) are those of the OCP Microscaling Formats, version 1.0.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig
from quark.errors import CheckpointError
from quark.numbers import PerPaddedGroup, TensorQuantizer, quantizer_for

__all__ = [
    "ScaleBlocks",
    "e2m1_values",
    "packed_words",
    "positive_scales",
    "qscheme_of",
    "runs_along_rows",
    "short_block",
    "short_block_of",
    "spec_of_layout",
    "streamed_codes",
    "unpacked_words",
    "weight_quantizer",
]

_OBSERVERS = {
    "per_tensor": "PerTensorMinMaxObserver",
    "per_channel": "PerChannelMinMaxObserver",
    "per_group": "PerGroupMinMaxObserver",
}


@attrs.frozen
class ScaleBlocks:
    """The division of a tensor ``[…, O, I]`` into blocks. The elements of a block share a scale.

    Attributes:
        grid: Shape of the scales, ``[…, O', I']`` for O' x I' blocks. The leading axes are those of the
            tensor. If all leading indices share the scales, the leading axes are missing.
        rows: Number of rows in a block. The last block may have fewer rows.
        columns: Number of columns in a block. The last block may have fewer columns.
    """

    grid: tuple[int, ...]
    rows: int
    columns: int

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int] | None = None) -> ScaleBlocks:
        """Return the division into blocks that follows from the shapes of the codes and of the scales.

        Args:
            name: Full name of the codes, for messages.
            shape: Shape of the codes, ``[O, I]`` or ``[experts, O, I]``.
            scale: Shape of the scales. There is one scale for the whole tensor, or one for each expert, row
                or block.
            block: Number of rows and columns in a block, as the checkpoint states. If this is None, each axis
                is split into equal blocks. The argument is ignored if there is only one scale, or one scale
                for each row.

        Raises:
            CheckpointError: The scales do not fit the codes.
        """
        grid = _grid(shape, scale)
        if grid is None or len(shape) < 2:
            raise CheckpointError(
                f"'{name}' has the shape {list(shape)}, but its scales have the shape {list(scale)}. The checkpoint is damaged"
            )
        said_rows, said_columns = (None, None) if block is None or (grid[-1] == 1 and grid[-2] in (1, shape[-2])) else block
        rows, columns = _size(shape[-2], grid[-2], said_rows), _size(shape[-1], grid[-1], said_columns)
        if rows is None or columns is None:
            said = "" if block is None else f" in blocks of {block[0]} x {block[1]}"
            raise CheckpointError(
                f"'{name}' has the shape {list(shape)}, which scales {list(scale)} do not divide{said}. The checkpoint is damaged"
            )
        return cls(grid, max(1, rows), max(1, columns))

    def values(self, codes: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the values ``(codes − zero_point) · scale`` in ``dtype``.

        The function computes in float32, one matrix at a time.

        Args:
            codes: Codes ``[…, O, I]`` of any dtype that can be converted to float32.
            scale: Scales, with the number of elements that ``grid`` gives. Scales in uint8 are E8M0 codes.
            zero_point: Zero points with as many elements as ``scale``, or None if there are no zero points.
            dtype: Dtype of the result.
        """
        scales = _numbers(scale).reshape(self.grid)
        zero_points = None if zero_point is None else zero_point.float().reshape(self.grid)
        if codes.ndim == 2:
            return self._matrix(codes, scales, zero_points).to(dtype)
        values = torch.empty(codes.shape, dtype=dtype, device=codes.device)
        for i, matrix in enumerate(codes):
            own = i if len(self.grid) == codes.ndim else slice(None)
            values[i] = self._matrix(matrix, scales[own], None if zero_points is None else zero_points[own])
        return values

    def _matrix(self, codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        values = codes.float()
        if zero_point is not None:
            values -= self._spread(zero_point, codes.shape)
        return values.mul_(self._spread(scale, codes.shape))

    def _spread(self, grid: Tensor, shape: torch.Size) -> Tensor:
        """Repeat scales or zero points so that the result can be broadcast to the shape ``shape``."""
        for axis, size in ((0, self.rows), (1, self.columns)):
            if grid.shape[axis] > 1 and size > 1:
                grid = grid.repeat_interleave(size, axis).narrow(axis, 0, shape[axis])
        return grid


def _grid(shape: tuple[int, ...], scale: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape ``scale`` with one axis for rows and one axis for columns.

    Return None if such scales do not fit codes of the shape ``shape``.
    """
    lead = shape[:-2]
    if len(scale) == len(shape) and scale[:-2] == lead:
        return scale
    if all(length == 1 for length in scale):
        return (1, 1)
    if scale == (*lead, shape[-2]):
        return (*scale, 1)
    return (*lead, 1, 1) if lead and scale == lead else None


def _size(length: int, count: int, said: int | None) -> int | None:
    """Return the block size on an axis of ``length`` elements that has ``count`` scales.

    ``said`` is the block size that the checkpoint states, or None. Return None if no block size fits.
    """
    if said is not None:
        return said if -(-length // said) == count else None
    return length // count if count and length % count == 0 else None


def _numbers(scale: Tensor) -> Tensor:
    if scale.dtype is not torch.uint8:
        return scale.float()
    exponents = scale.float() - 127  # E8M0 of the Microscaling specification: 255 is NaN
    return torch.exp2(exponents).masked_fill_(scale == 255, torch.nan)


_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def e2m1_values(packed: Tensor) -> Tensor:
    """Return the float32 values of FP4 codes (E2M1).

    Each byte has two codes, with the first code in the low half. The last axis becomes twice as long.

    >>> e2m1_values(torch.tensor([[0x21, 0xF8]], dtype=torch.uint8)).tolist()
    [[0.5, 1.0, -0.0, -6.0]]
    """
    grid = torch.tensor(_VALUES, dtype=torch.float32, device=packed.device)
    return grid[torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2).int()]


_WORD = 32


def packed_words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes into 32-bit words. This also works on meta tensors.

    >>> [hex(word) for word in packed_words(torch.arange(10, dtype=torch.uint8)[None], 4)[0].tolist()]
    ['0x76543210', '0x98']

    Args:
        codes: uint8 ``[rows, columns]``.
        bits: 4 or 8.

    Returns:
        Words as int32 ``[rows, ⌈columns · bits / 32⌉]``. The last word is padded with zeros.
    """
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (_WORD // bits)))
    if bits == 4:
        padded = padded[:, 0::2] | (padded[:, 1::2] << 4)
    return padded.reshape(-1).view(torch.int32).reshape(len(codes), -1)


def unpacked_words(words: Tensor, bits: int, columns: int) -> Tensor:
    """Undo `packed_words`. Other than `packed_words`, this also supports codes of 1 and 2 bits.

    Return uint8 codes ``[rows, columns]``.
    """
    data = words.reshape(-1).view(torch.uint8).reshape(len(words), -1)
    if bits < 8:
        data = torch.stack([(data >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], dim=-1).flatten(1)
    return data[:, :columns]


def positive_scales(codes: Tensor, zero_points: Tensor, scales: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, zero points and scales for the same values, but without negative scales.

    AutoRound writes negative scales. If ``top`` is the largest code, ``(code − zero) · scale`` is equal to
    ``(top − code − (top − zero)) · −scale``.

    Args:
        codes: uint8 ``[O, I]``.
        zero_points: int32 ``[O, groups]``. All groups have the same number of consecutive columns.
        scales: Float ``[O, groups]``.
        bits: Bits of a code.
    """
    mirrored = scales < 0
    if not bool(mirrored.any()):
        return codes, zero_points, scales
    top = 2**bits - 1
    of_columns = mirrored.repeat_interleave(-(-codes.shape[1] // scales.shape[1]), 1)[:, : codes.shape[1]]
    return torch.where(of_columns, top - codes, codes), torch.where(mirrored, top - zero_points, zero_points), scales.abs()


def streamed_codes(words: Tensor, bits: int) -> Tensor:
    """Unpack codes from rows of 32-bit words.

    A row is a stream of bits that begins with the lowest bit of the first word. Thus, 32 codes fill ``bits``
    words, and a code may begin in one word and end in the next.

    >>> streamed_codes(torch.tensor([[0b10_001_000, 0, 0]], dtype=torch.int32), 3)[0, :4].tolist()
    [0, 1, 2, 0]

    Args:
        words: int32 ``[rows, n · bits]``.
        bits: Number of bits of a code, 1 to 8.

    Returns:
        Codes as uint8 ``[rows, n · 32]``.
    """
    blocks = words.unflatten(-1, (-1, bits))
    codes = torch.empty(*blocks.shape[:-1], _WORD, dtype=torch.uint8, device=words.device)
    for place in range(_WORD):
        word, shift = divmod(place * bits, _WORD)
        here = min(bits, _WORD - shift)  # a right shift of int32 fills with the sign bit, so each part is masked
        code = (blocks[..., word] >> shift) & (2**here - 1)
        if here < bits:
            code = code | ((blocks[..., word + 1] & (2 ** (bits - here) - 1)) << here)
        codes[..., place] = code
    return codes.flatten(-2)


def qscheme_of(spec: QTensorConfig) -> str | None:
    """Return the name of a spec's granularity (``qscheme``), or None if the spec has no granularity."""
    return None if spec.qscheme is None else spec.qscheme.name


def runs_along_rows(spec: QTensorConfig) -> bool:
    """Return whether a group of the weight consists of successive output channels.

    Only quark's own layout supports such groups.
    """
    return qscheme_of(spec) == "per_group" and spec.ch_axis == 0


def spec_of_layout(dtype: str, qscheme: str, **settings: Any) -> QTensorConfig:
    """Return a tensor spec with the settings that are usual in the layouts of this package.

    Unless ``settings`` has other values, the spec is symmetric and static, rounds half to even, and has
    floating-point scales.
    """
    usual = {"symmetric": True, "is_dynamic": False, "scale_type": "float", "round_method": "half_even"}
    return QTensorConfig(dtype=dtype, qscheme=qscheme, **{"observer_cls": _OBSERVERS.get(qscheme), **usual, **settings})


def short_block(quantizer: TensorQuantizer, length: int) -> str | None:
    """Return an error message if the last block of a row is shorter than the others, otherwise None.

    The message is a predicate without a subject.

    Args:
        quantizer: Quantizer of a weight or an activation.
        length: Length of the tensor's last axis.
    """
    granularity = quantizer.granularity
    if not isinstance(granularity, PerPaddedGroup) or length % granularity.size == 0:
        return None
    return f"has rows of {length} elements, which blocks of {granularity.size} do not divide"


def short_block_of(config: QLayerConfig, shape: tuple[int, ...]) -> str | None:
    """Return an error message if the weight, the input or the output of a layer has a short last block.

    Return None if all blocks are full. ``shape`` is the shape of the layer's weight. See `short_block`.
    """
    weight = None if config.weight is None else short_block(weight_quantizer(config), shape[-1])
    places = ((config.input_tensors, "input", shape[-1]), (config.output_tensors, "output", shape[0]))
    activations = ((name, short_block(quantizer_for(spec, activation=True), n)) for spec, name, n in places if spec is not None)
    return next((f"its {name} {error}" for name, error in (("weight", weight), *activations) if error is not None), None)


def weight_quantizer(config: QLayerConfig) -> TensorQuantizer:
    """Return the quantizer of a layer's weight. The configuration must quantize the weight."""
    assert config.weight is not None
    return quantizer_for(config.weight, activation=False)
