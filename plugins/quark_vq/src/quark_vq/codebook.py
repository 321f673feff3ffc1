"""Codebook: a number format in which one code describes several neighbouring elements of a weight."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from quark.config.layer import TensorSpec
from quark.config.tensor import QTensorConfig
from quark.numbers import Granularity, NumberFormat, Packing, QParams
from quark_vq.learning import FAR, learned, nearest

__all__ = ["VQ2", "VQ3", "Codebook", "CodebookPacking", "LearnedCodebook"]

_LANES = 8
"""Number of codes that are packed together. With b bits each, they fill b bytes."""
_LARGEST_ENTRY = float(torch.finfo(torch.float16).max)


@attrs.frozen
class CodebookPacking(Packing):
    """Packs eight codes of ``bits`` bits into ``bits`` bytes.

    Scales are stored as bfloat16, and the codebook is stored as float16.
    """

    bits: int

    def pack(self, codes: Tensor, granularity: Granularity, order: str) -> Tensor:
        lanes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % _LANES)).unflatten(-1, (-1, _LANES)).to(torch.int32)
        words = (lanes << self.bits * torch.arange(_LANES, dtype=torch.int32, device=codes.device)).sum(-1, dtype=torch.int32)
        shifts = 8 * torch.arange(self.bits, dtype=torch.int32, device=codes.device)
        return (words[..., None] >> shifts).bitwise_and_(0xFF).to(torch.uint8).flatten(-2)

    def unpack(self, packed: Tensor, granularity: Granularity, order: str, shape: tuple[int, ...]) -> Tensor:
        parts = packed.unflatten(-1, (-1, self.bits)).to(torch.int32)
        words = (parts << 8 * torch.arange(self.bits, dtype=torch.int32, device=packed.device)).sum(-1, dtype=torch.int32)
        shifts = self.bits * torch.arange(_LANES, dtype=torch.int32, device=packed.device)
        codes = (words[..., None] >> shifts).bitwise_and_((1 << self.bits) - 1).to(torch.uint8)
        return codes.flatten(-2)[..., : shape[-1]].contiguous()

    def pack_qparams(self, qparams: QParams, spec: QTensorConfig, granularity: Granularity, order: str) -> dict[str, Tensor]:
        assert qparams.table is not None
        return {"scale": qparams.scale.to(torch.bfloat16), "table": qparams.table.to(torch.float16)}

    def unpack_qparams(
        self, tensors: Mapping[str, Tensor], spec: QTensorConfig, granularity: Granularity, order: str, shape: tuple[int, ...]
    ) -> QParams:
        return QParams(tensors["scale"].float(), table=tensors["table"].float())


@attrs.frozen(kw_only=True)
class Codebook(NumberFormat):
    """A format in which ``vector`` neighbouring elements are replaced by the nearest entry of a codebook.

    A codebook is learned for each weight. The observer computes the scale, for example as the root mean
    square of a channel. The entries are multiplied by the scale to get elements.

    Attributes:
        name: Registered name.
        bits: Number of bits per element. A codebook has ``2 ** (bits * vector)`` entries.
        vector: Number of elements of a vector.
    """

    name: str
    bits: int
    vector: int
    storage_dtype: torch.dtype = torch.uint8
    default_observer: str = "RMSObserver"
    packing: Packing = attrs.field(default=attrs.Factory(lambda self: CodebookPacking(self.bits), takes_self=True))

    @property
    def table_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Shape of the codebook, ``[entries, vector]``."""
        return (1 << self.bits * self.vector, self.vector)

    def max_magnitude(self, spec: QTensorConfig) -> float:
        """Return 1, because a codebook is learned from weights that are divided by their scales."""
        return 1.0

    def spec_error(self, spec: QTensorConfig) -> str | None:
        if spec.scale_format not in (None, "bfloat16"):
            return f"{self.name} has scales in bfloat16, but the spec says {spec.scale_format}: leave out scale_format"
        return super().spec_error(spec.set(scale_format=None))

    def canonicalize(self, spec: QTensorConfig) -> TensorSpec:
        return spec.set(scale_format="bfloat16")

    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        limits = torch.finfo(torch.bfloat16)
        size = torch.maximum(-low, high)
        scale = size.clamp(limits.tiny, limits.max).to(torch.bfloat16).float()
        return QParams(torch.where(size.isfinite(), scale, size))  # the scale of an infinite value stays infinite

    def learned_table(self, t: Tensor, importance: Tensor) -> Tensor:
        vectors, weight = t.reshape(-1, self.vector), importance.expand_as(t).reshape(-1, self.vector)
        entries = learned(vectors, weight, self.table_shape[0])
        return entries.clamp_(-_LARGEST_ENTRY, _LARGEST_ENTRY).to(torch.float16).float()

    def with_table(self, table: Tensor) -> LearnedCodebook:
        return LearnedCodebook(name=self.name, bits=self.bits, vector=self.vector, entries=table)

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        raise _without_entries()

    def encode(self, t: Tensor) -> Tensor:
        raise _without_entries()

    def decode(self, codes: Tensor) -> Tensor:
        raise _without_entries()


def _without_entries() -> NotImplementedError:
    return NotImplementedError("a codebook has no values before it is learned: call with_table(table) first")


@attrs.frozen(kw_only=True, eq=False)
class LearnedCodebook(Codebook):
    """A `Codebook` whose entries are learned.

    Attributes:
        entries: The entries, as a float32 tensor ``[number of entries, vector]``.
    """

    entries: Tensor

    def with_table(self, table: Tensor) -> LearnedCodebook:
        return attrs.evolve(self, entries=table)

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        rounded = self.entries[self._numbers(t)].view(t.shape)
        return t.copy_(torch.where(t.isnan(), t, rounded))

    def round_in_(self, t: Tensor, metric: Tensor) -> Tensor:
        root = torch.linalg.cholesky(metric / metric.diagonal().mean())
        rounded = self.entries[nearest(t.clamp(-FAR, FAR) @ root, self.entries @ root)]
        return t.copy_(torch.where(t.isnan(), t, rounded))

    def encode(self, t: Tensor) -> Tensor:
        parts = self._numbers(t)[:, None] >> self.bits * torch.arange(self.vector, device=t.device)
        return parts.bitwise_and_((1 << self.bits) - 1).to(self.storage_dtype).view(t.shape)

    def codes(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return self.encode(t)

    def decode(self, codes: Tensor) -> Tensor:
        parts = codes.reshape(-1, self.vector).to(torch.int32)
        shifts = self.bits * torch.arange(self.vector, dtype=torch.int32, device=codes.device)
        return self.entries[(parts << shifts).sum(1)].view(codes.shape)

    def _numbers(self, t: Tensor) -> Tensor:
        """Return the index of the nearest entry for each vector."""
        return nearest(t.reshape(-1, self.vector).clamp(-FAR, FAR), self.entries)


VQ2 = Codebook(name="vq2", bits=2, vector=4)
VQ3 = Codebook(name="vq3", bits=3, vector=2)
