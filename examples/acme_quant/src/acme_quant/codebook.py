"""acme_nf3: codes are indices into eight normal quantiles, which lie in [−1, 1] and include 0.

Source: the construction of NormalFloat (Dettmers et al., "QLoRA", 2023, §3), for three bits.
"""

from __future__ import annotations

from statistics import NormalDist

import torch
from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.numbers import Granularity, NumberFormat, Packing

__all__ = [
    "ACME_NF3",
    "BITS",
    "BOUNDS",
    "VALUES",
    "AcmeNf3",
    "ThreeBitPacking",
    "nearest_boundaries",
    "normal_quantiles",
    "pack_three",
    "unpack_three",
]

BITS = 3


def normal_quantiles(bits: int) -> Tensor:
    """Return the ``2^bits`` values of the codebook as an ascending float32 tensor. They lie in [-1, 1].

    The values are quantiles of the normal distribution. On each side of 0, their probabilities are equally
    spaced. There is one more value above 0 than below 0. The last value is the quantile for the probability
    ``1 - d``, where d is the mean of half of ``1 / 2^bits`` and half of ``1 / (2^bits - 1)``. All values are
    divided by the last value.
    """
    count = 1 << bits
    above, below = count // 2, count // 2 - 1
    reach = 0.5 - (1 / count + 1 / (count - 1)) / 4
    normal = NormalDist()
    largest = normal.inv_cdf(0.5 + reach)
    low = [-normal.inv_cdf(0.5 + reach * i / below) / largest for i in range(below, 0, -1)]
    high = [normal.inv_cdf(0.5 + reach * i / above) / largest for i in range(1, above + 1)]
    return torch.tensor([*low, 0.0, *high], dtype=torch.float32, device="cpu")


def nearest_boundaries(values: Tensor) -> Tensor:
    """Return the float32 bounds ``[n - 1]`` between ascending values ``[n]``.

    A number above bound *i* is nearer to value *i + 1* than to value *i*. A number up to bound *i* is nearer
    to value *i*. If a number is exactly at the midpoint of two values, it gets the even code.

    Midpoints are computed exactly in float64 and rounded down to float32. So no float32 number lies between a
    midpoint and the bound.
    """
    exact = (values[:-1].double() + values[1:].double()) / 2
    bound = exact.float()
    odd = torch.arange(len(bound), device=values.device) % 2 == 1
    too_high = (bound.double() > exact) | ((bound.double() == exact) & odd)
    return torch.where(too_high, torch.nextafter(bound, torch.tensor(-torch.inf, device=values.device)), bound)


VALUES = normal_quantiles(BITS)
BOUNDS = nearest_boundaries(VALUES)


def pack_three(codes: Tensor) -> Tensor:
    """Pack every eight 3-bit codes into three bytes, in little-endian order.

    The codes ``[…, K]`` become uint8 values ``[…, 3 ceil(K / 8)]``. If K is not a multiple of 8, codes 0 are
    appended.
    """
    whole = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 8)).to(torch.int32)
    places = torch.arange(0, 24, 3, dtype=torch.int32, device=codes.device)
    words = (whole.reshape(*codes.shape[:-1], -1, 8) << places).sum(-1, keepdim=True, dtype=torch.int32)
    return ((words >> torch.arange(0, 24, 8, dtype=torch.int32, device=codes.device)) & 0xFF).to(torch.uint8).reshape(*codes.shape[:-1], -1)


def unpack_three(packed: Tensor, length: int) -> Tensor:
    """Undo `pack_three`: return the first ``length`` codes of each row, as uint8 values from 0 to 7."""
    places = torch.arange(0, 24, 8, dtype=torch.int32, device=packed.device)
    words = (packed.reshape(*packed.shape[:-1], -1, 3).to(torch.int32) << places).sum(-1, keepdim=True, dtype=torch.int32)
    codes = (words >> torch.arange(0, 24, 3, dtype=torch.int32, device=packed.device)) & 0x7
    return codes.to(torch.uint8).reshape(*packed.shape[:-1], -1)[..., :length].contiguous()


class ThreeBitPacking(Packing):
    """Packs eight codes into three bytes, and stores scales unchanged."""

    def pack(self, codes: Tensor, granularity: Granularity, order: str) -> Tensor:
        return pack_three(codes)

    def unpack(self, packed: Tensor, granularity: Granularity, order: str, shape: tuple[int, ...]) -> Tensor:
        return unpack_three(packed, shape[-1])


class AcmeNf3(NumberFormat):
    """The number format acme_nf3. It has no state. The only instance is `ACME_NF3`.

    Values that are larger than the scale in magnitude saturate. Rounding returns NaN for NaN. Three bits have
    no code for NaN, so `encode` maps NaN to the last code.
    """

    name = "acme_nf3"
    bits = BITS
    storage_dtype = torch.uint8
    default_observer = "AcmeRmsObserver"
    packing = ThreeBitPacking()

    def max_magnitude(self, spec: QTensorConfig) -> float:
        return 1.0

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        nearest = self.decode(self.encode(t))
        return t.copy_(torch.where(t.isnan(), t, nearest))

    def encode(self, t: Tensor) -> Tensor:
        # A codebook value is nearest to itself, so rounding and encoding use the same search.
        return torch.bucketize(t, BOUNDS.to(t.device), out_int32=True).to(self.storage_dtype)

    def decode(self, codes: Tensor) -> Tensor:
        return VALUES.to(codes.device)[codes.to(torch.int32)]


ACME_NF3 = AcmeNf3()
