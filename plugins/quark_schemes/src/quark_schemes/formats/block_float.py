"""The block floating-point formats MXINT8, BFP16, MX6 and MX9.

The elements of a block have integer mantissas and share an exponent ``E``, the exponent of the block's
largest magnitude. A value is ``mantissa · 2^(E − fraction bits)``. A checkpoint stores the exponent as the
byte E + 127. The formats have no zero points.

MX6 and MX9 have shared microexponents: the elements of a block share the exponent E, and the two elements of
each pair of neighbours share one more bit. If both values of the pair are below 2^E in magnitude, the bit is
set, and the step of the pair is half as large. An element has a sign bit and four (MX6) or seven (MX9) other
bits. The bit of the pair adds half a bit per element. In blocks of 16, the exponent adds another half, so
that an element needs six or nine bits. A checkpoint stores the mantissas of a block first, in two's
complement, with the first mantissa in the lowest bits. Then it stores the bits of the pairs, with the first
pair in the lowest bit.

Source: OCP Microscaling Formats v1.0 (MXINT8); Darvish Rouhani et al., arXiv 2302.08007 (MX6, MX9); AMD Quark
0.13 (BFP16, MX6, MX9).
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from quark.config.enums import Dtype, QSchemeType
from quark.config.layer import TensorSpec
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError
from quark.numbers import Granularity, Packing, PerGroup, PerPaddedGroup, QParams, Spacing
from quark.numbers.kernels import DeviceCode
from quark_schemes.arithmetic.packing import pack_bits, pack_flags, unpack_bits, unpack_flags
from quark_schemes.arithmetic.shared_exponent import MODES, decode_e8m0, encode_e8m0, shared_exponent_scale
from quark_schemes.formats.integer import WholeNumbers

__all__ = [
    "BFP16",
    "MX",
    "MX6",
    "MX9",
    "PAIR_BITS",
    "BlockFloat",
    "Microexponent",
    "MicroexponentPacking",
    "MxFormat",
    "SharedExponentPacking",
]


PAIR_BITS = 8
"""Number of pairs whose bits fill a byte."""


@attrs.frozen
class SharedExponentPacking(Packing):
    """Stores mantissas unchanged, and the scale of a block as one byte.

    The scale is ``2^(E − fraction_bits)``, and the byte is the E8M0 code of the exponent E.
    """

    fraction_bits: int

    def pack_qparams(self, qparams: QParams, spec: QTensorConfig, granularity: Granularity, order: str) -> dict[str, Tensor]:
        return {"scale": encode_e8m0(qparams.scale * 2.0**self.fraction_bits)}

    def unpack_qparams(
        self, tensors: dict[str, Tensor], spec: QTensorConfig, granularity: Granularity, order: str, shape: tuple[int, ...]
    ) -> QParams:
        return QParams(decode_e8m0(tensors["scale"]) * 2.0**-self.fraction_bits)


@attrs.frozen
class MicroexponentPacking(SharedExponentPacking):
    """Packs the mantissas of a block, followed by a bit for each pair of neighbouring elements.

    A mantissa has ``mantissa_bits`` bits in two's complement. The first mantissa is in the lowest bits of the
    first byte.
    """

    mantissa_bits: int

    def pack(self, codes: Tensor, granularity: Granularity, order: str) -> Tensor:
        blocks = codes.reshape(*codes.shape[:-1], -1, _block(granularity))
        mantissas = (blocks >> 1).to(torch.int8)
        packed = pack_bits(mantissas, self.mantissa_bits) if self.mantissa_bits < 8 else mantissas.view(torch.uint8)
        pairs = pack_flags((blocks[..., ::2] & 1).to(torch.uint8))
        return torch.cat((packed, pairs), dim=-1).reshape(*codes.shape[:-1], -1)

    def unpack(self, packed: Tensor, granularity: Granularity, order: str, shape: tuple[int, ...]) -> Tensor:
        block = _block(granularity)
        mantissa_bytes = block * self.mantissa_bits // 8
        blocks = packed.reshape(*shape[:-1], shape[-1] // block, mantissa_bytes + block // (2 * PAIR_BITS))
        data, pairs = blocks[..., :mantissa_bytes].contiguous(), blocks[..., mantissa_bytes:]
        narrow = self.mantissa_bits < 8
        mantissas = unpack_bits(data, self.mantissa_bits, block, signed=True) if narrow else data.view(torch.int8)
        flags = unpack_flags(pairs).to(torch.int16).mul_(0x0101).view(torch.int8)  # one for each of a pair
        return mantissas.to(torch.int16).bitwise_left_shift_(1).bitwise_or_(flags).reshape(shape)


def _block(granularity: Granularity) -> int:
    assert isinstance(granularity, PerGroup)
    return granularity.size


_SMALLEST = 2.0**-126
"""Smallest scale. It is float32's smallest normal number, because the reciprocal of this number is finite."""


@attrs.frozen(kw_only=True)
class BlockFloat(WholeNumbers):
    """A block floating-point format: the elements of a block are integer mantissas and share an exponent.

    Attributes:
        low, high: The smallest and the largest mantissa.
        fraction_bits: Number of fraction bits in a mantissa.
        block: Default number of elements in a block.
        grows: Whether the exponent increases if the largest value would be rounded to more than ``high``. If
            not, the value saturates.
        modes: Accepted values of ``scale_calculation_mode``, with the default first. If there are none, E is
            always the exponent of the largest magnitude.
        even_bits: Number of mantissa bits to which the mode ``"even"`` rounds the largest value.
        pads: Whether the last block of a row may be shorter than ``block``.
    """

    name: str
    bits: float
    storage_dtype: torch.dtype
    low: int
    high: int
    fraction_bits: int
    block: int
    grows: bool = False
    modes: tuple[str, ...] = ()
    even_bits: int = 0
    pads: bool = True
    default_observer: str = "PerBlockMXObserver"
    packing: Packing = attrs.field(default=attrs.Factory(lambda self: SharedExponentPacking(self.fraction_bits), takes_self=True))

    def canonicalize(self, spec: QTensorConfig) -> TensorSpec:
        return attrs.evolve(
            spec,
            qscheme=QSchemeType.per_group,
            ch_axis=-1 if spec.ch_axis is None else spec.ch_axis,
            group_size=self.block if spec.group_size is None else spec.group_size,
            is_dynamic=spec.is_dynamic is not False,
            # If the exponent can grow, it depends on which end of the range has the larger magnitude, so
            # observers must find both ends.
            symmetric=not self.grows,
            observer_cls=spec.observer_cls or self.default_observer,
        )

    def spec_error(self, spec: QTensorConfig) -> str | None:
        # Formats without modes accept all known modes, because AMD Quark's configurations of these formats
        # contain one.
        if spec.scale_calculation_mode not in (None, *(self.modes or MODES)):
            return f"scale_calculation_mode={spec.scale_calculation_mode!r} is unknown: use one of {', '.join(self.modes or MODES)}"
        if spec.scale_format not in (None, "e8m0"):
            return f"{self.name} has powers of two as scales, not scale_format={spec.scale_format!r}: leave scale_format out"
        return None

    def granularity(self, spec: QTensorConfig, *, activation: bool) -> Granularity:
        found = super().granularity(spec, activation=activation)
        return PerPaddedGroup.of(found) if self.pads else found

    def by_reciprocal(self, spec: QTensorConfig) -> bool:
        return True  # exact: scales are powers of two, and no scale is so small that its reciprocal overflows

    def device_code(self, spec: QTensorConfig) -> DeviceCode | None:
        from quark_schemes.kernels.integer import block_float_code

        return block_float_code(self.low, self.high, self.fraction_bits, self._mode(spec), self.even_bits, self.grows)

    def _mode(self, spec: QTensorConfig) -> str:
        return (spec.scale_calculation_mode or self.modes[0]) if self.modes else "floor"

    def max_magnitude(self, spec: QTensorConfig) -> float:
        return float(self.high)

    def spacing(self, spec: QTensorConfig) -> Spacing | None:
        return Spacing(smallest=0.5, largest=-self.low, steps=-self.low)

    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        amax = torch.maximum(-low, high)
        mode = self._mode(spec)
        # In units of the last mantissa bit, the largest value of a block is at least 2^fraction_bits.
        scale = shared_exponent_scale(amax, mode, self.even_bits, 0, self.high / (1 << self.fraction_bits))
        scale = (scale * 2.0**-self.fraction_bits).clamp(min=_SMALLEST)
        if self.grows:
            scale = torch.where((high / scale).round_() > self.high, scale * 2, scale)
        return QParams(scale)

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return t.round_().clamp_(self.low, self.high)


@attrs.frozen(kw_only=True)
class MxFormat(BlockFloat):
    """The format ``mx`` of AMD Quark's public API.

    The field ``mx_element_dtype`` of a spec names the element format. This class implements only INT8
    elements. It replaces a spec with other elements by a spec of their number format.
    """

    def canonicalize(self, spec: QTensorConfig) -> TensorSpec:
        if spec.mx_element_dtype is None:
            raise ConfigError("Dtype.mx needs mx_element_dtype: Dtype.int8, fp4, fp6_e2m3, fp6_e3m2, fp8_e4m3 or fp8_e5m2")
        canonical = super().canonicalize(spec)
        assert isinstance(canonical, QTensorConfig)
        if spec.mx_element_dtype is Dtype.int8:
            return canonical
        return attrs.evolve(canonical, dtype=spec.mx_element_dtype, mx_element_dtype=None, scale_format="e8m0")


MX = MxFormat(name="mx", bits=8, storage_dtype=torch.int8, low=-127, high=127, fraction_bits=6, block=32, modes=MODES, even_bits=8)
BFP16 = BlockFloat(name="bfp16", bits=8, storage_dtype=torch.int8, low=-128, high=127, fraction_bits=6, block=8, grows=True)


_ONE_EXPONENT = 1 << 23
_MAGNITUDE = 0x7FFFFFFF


def _bits(value: float) -> int:
    """Return the bits of a number in float32, as an integer."""
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


@attrs.frozen(kw_only=True)
class Microexponent(BlockFloat):
    """Block floating point in which two neighbours on the last axis share one additional exponent bit.

    The length of the last axis must therefore be even.

    A code is ``2 · mantissa + bit``, with the additional bit of the pair. The block size must divide the
    length of a row.
    """

    pads: bool = False
    packing: Packing = attrs.field(
        default=attrs.Factory(lambda self: MicroexponentPacking(self.fraction_bits, self.high.bit_length() + 1), takes_self=True)
    )

    @property
    def _limit(self) -> float:
        """The bound 2^E in steps. If both values of a pair are below 2^E in magnitude, the step is halved."""
        return float(1 << self.fraction_bits)

    def spec_error(self, spec: QTensorConfig) -> str | None:
        if spec.group_size is None or spec.group_size % (2 * PAIR_BITS):
            return f"{self.name} needs a block size that is a multiple of 16, not {spec.group_size}: use 16 or 32"
        if spec.ch_axis not in (-1, 1):
            return f"{self.name} packs blocks along the last axis: use ch_axis=-1, not {spec.ch_axis}"
        return super().spec_error(spec)

    def device_code(self, spec: QTensorConfig) -> DeviceCode | None:
        return None  # a code depends on two neighbours, so no device code per element; `element_format` has device code

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        halved = self._halved(t)
        high = (_bits(float(self.high)) - halved).view(torch.float32)
        torch.clamp(t, -high, high, out=t)
        # Adding and subtracting 1.5 · 2^23 steps rounds to whole steps, half to even.
        magic = halved.neg_().add_(_bits(1.5 * 2.0**23)).view(torch.float32)
        return t.add_(magic).sub_(magic)

    def subscales(self, t: Tensor) -> Tensor:
        return (_bits(1.0) - self._halved(t)).view(torch.float32)

    def element_format(self) -> BlockFloat:
        return BlockFloat(**attrs.asdict(self, recurse=False))

    def _halved(self, t: Tensor) -> Tensor:
        """Return ``1 << 23`` (int32) for elements whose step is halved, else 0.

        In the bits of a float32, ``1 << 23`` is 1 in the exponent field. The result has the shape of ``t``.
        """
        below = t.view(torch.int32).bitwise_and(_MAGNITUDE).sub_(_bits(self._limit))
        # Read two neighbours as one 64-bit number. Compute the AND of both sign bits, and copy it to all
        # bits.
        pair = below.view(torch.int64)
        both = pair.bitwise_left_shift(32).bitwise_and_(pair).bitwise_right_shift_(63)
        return both.view(torch.int32).bitwise_and_(_ONE_EXPONENT)

    def encode(self, t: Tensor) -> Tensor:
        return self.codes(t.clone())

    def codes(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        halved = self._halved(t)
        steps = t.mul_((halved + _bits(1.0)).view(torch.float32))
        mantissa = steps.round_().clamp_(self.low, self.high).to(torch.int16)
        return mantissa.bitwise_left_shift_(1).bitwise_or_(halved.bitwise_right_shift_(23).to(torch.int16))

    def decode(self, codes: Tensor) -> Tensor:
        # Count in half steps: a unit of the mantissa is one half step if the pair's bit is set, else two half
        # steps.
        return codes.bitwise_and(1).neg_().add_(2).mul_(codes >> 1).float().mul_(0.5)


MX6 = Microexponent(name="mx6", bits=5.5, storage_dtype=torch.int16, low=-15, high=15, fraction_bits=3, block=16)
MX9 = Microexponent(name="mx9", bits=8.5, storage_dtype=torch.int16, low=-127, high=127, fraction_bits=6, block=16)
