"""Formats whose pairs of elements share codes, or that learn a table, with one thing wrong each."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.numbers import NumberFormat


class Pairs(NumberFormat):
    """Pairs of whole numbers of which both are even, or both odd; sound."""

    name = "mutant_format"
    bits = 3
    vector = 2
    storage_dtype = torch.uint8

    def max_magnitude(self, spec: QTensorConfig) -> float:
        return 4.0

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        pairs = t.reshape(-1, 2)
        even, odd = (((pairs - shift) / 2).round() * 2 + shift for shift in (0, 1))
        even, odd = even.clamp(-2, 4), odd.clamp(-3, 3)
        far = pairs.clamp(-100, 100)
        is_even = ((even - far).square().sum(1) <= (odd - far).square().sum(1))[:, None]
        return t.copy_(torch.where(pairs.isnan(), pairs, torch.where(is_even, even, odd)).view(t.shape))

    def encode(self, t: Tensor) -> Tensor:
        return (t + 3).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        return codes.float() - 3


class LooksAtNeighbours(Pairs):
    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return super().round_(t.sub_(0.5 * (t[..., :1] > 1)), zero)


class TakesAnother(Pairs):
    """Takes even numbers, though odd ones may be nearer."""

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        t.copy_(torch.where(t.abs() < 1.2, t, (t / 2).round() * 2))
        return super().round_(t, zero)


class SaysFewerBits(Pairs):
    bits = 2


class RoundsACopy(Pairs):
    def round_in_(self, t: Tensor, metric: Tensor) -> Tensor:
        return self.round_(t.clone())


class LeavesTheGrid(Pairs):
    def round_in_(self, t: Tensor, metric: Tensor) -> Tensor:
        return self.round_(t).mul_(0.99)


class RoundsFarther(Pairs):
    def round_in_(self, t: Tensor, metric: Tensor) -> Tensor:
        return self.round_(t.neg_())


class Learns(NumberFormat):
    """A table of four numbers, and the nearest of them; sound."""

    name = "mutant_format"
    bits = 2
    storage_dtype = torch.uint8
    table_shape = (4,)
    table: Tensor

    def max_magnitude(self, spec: QTensorConfig) -> float:
        return 1.0

    def learned_table(self, t: Tensor, importance: Tensor) -> Tensor:
        return torch.tensor([-1.0, 0.0, 0.5, 1.0]) * t.abs().amax().clamp(max=1e6).nan_to_num(1.0)

    def with_table(self, table: Tensor) -> NumberFormat:
        bound = type(self)()
        bound.table = table
        return bound

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return t.copy_(torch.where(t.isnan(), t, self.decode(self.encode(t))))

    def encode(self, t: Tensor) -> Tensor:
        return (t[..., None].clamp(-1e9, 1e9) - self.table).abs().argmin(-1).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        return self.table[codes.int()]


class LearnsByChance(Learns):
    counts = itertools.count(1)

    def learned_table(self, t: Tensor, importance: Tensor) -> Tensor:
        return super().learned_table(t, importance) * (1 + 0.01 * next(self.counts))


class LearnsTooFew(Learns):
    def learned_table(self, t: Tensor, importance: Tensor) -> Tensor:
        return super().learned_table(t, importance)[:3]


class LearnsInDouble(Learns):
    def learned_table(self, t: Tensor, importance: Tensor) -> Tensor:
        return super().learned_table(t, importance).double()


class LearnsOfMany(Learns):
    def learned_table(self, t: Tensor, importance: Tensor) -> Tensor:
        return super().learned_table(t, importance) * (1 + 0 * t.reshape(-1)[3])


class UsesImportanceUp(Learns):
    def learned_table(self, t: Tensor, importance: Tensor) -> Tensor:
        importance.div_(importance.sum())
        return super().learned_table(t, importance)


class LearnsWithAGraph(Learns):
    def learned_table(self, t: Tensor, importance: Tensor) -> Tensor:
        return super().learned_table(t, importance).requires_grad_()


class LearnsAView(Learns):
    def learned_table(self, t: Tensor, importance: Tensor) -> Tensor:
        return t.view(-1)[:1].expand(4)
