"""Groups that do not divide a row are refused by the plan, or their tail is served like the rest."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import Tensor

from quark.base.lazy import ObjectRef
from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig
from quark.numbers import Granularity
from quark.plugins import FormatRecord, SchemeRecord
from quark_devkit import all_checks, run_check

from .broken_formats import Plain
from .mutant import subject_among

CHECK = all_checks()["scheme:refuses_or_serves_ragged_groups"]


@attrs.frozen
class Ragged(Granularity):
    """Groups of ``size`` columns; the last group of a row may be shorter."""

    size: int
    is_local = True

    def _padded(self, columns: int) -> int:
        return -(-columns // self.size) * self.size

    def rows(self, x: Tensor) -> Tensor:
        tail = x[..., -1:].expand(*x.shape[:-1], self._padded(x.shape[-1]) - x.shape[-1])
        return torch.cat([x, tail], -1).reshape(-1, self.size)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], self._padded(shape[-1]) // self.size)

    def restore(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        return rows.reshape(*shape[:-1], self._padded(shape[-1]))[..., : shape[-1]].contiguous()

    def expand_scale(self, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
        return scale.repeat_interleave(self.size, -1)[..., : shape[-1]]

    def reduce_scale(self, expanded: Tensor, shape: tuple[int, ...]) -> Tensor:
        return expanded[..., :: self.size]


class LosesTheTail(Ragged):
    """Gives zeros for the columns of the last group."""

    def restore(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        restored = super().restore(rows, shape)
        restored[..., shape[-1] // self.size * self.size :] = 0
        return restored


class CannotRestore(Ragged):
    """Serves whole groups only, and does not say so."""

    def restore(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        return rows.reshape(shape)


class RefusesIt(Ragged):
    """Says so, with the numbers."""

    def shape_error(self, shape: tuple[int, ...]) -> str | None:
        return f"has {shape[-1]} columns, which groups of {self.size} do not divide" if shape[-1] % self.size else None


class RefusesWithoutNumbers(Ragged):
    """Says so, and not which numbers do not fit."""

    def shape_error(self, shape: tuple[int, ...]) -> str | None:
        return "does not fit" if shape[-1] % self.size else None


@pytest.mark.parametrize(
    ("granularity", "message"),
    [
        (Ragged(48), None),
        (RefusesIt(48), None),
        (LosesTheTail(48), "changes a column by 1,"),
        (CannotRestore(48), "raised RuntimeError"),
        (RefusesWithoutNumbers(48), "without naming"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Granularity) else "",
)
def test_ragged_groups(granularity: Ragged, message: str | None) -> None:
    class Format(Plain):
        def granularity(self, spec: QTensorConfig, *, activation: bool) -> Granularity:
            return granularity

    def build() -> QLayerConfig:
        spec = {"qscheme": "per_group", "ch_axis": -1, "group_size": 48, "symmetric": True, "is_dynamic": False}
        return QLayerConfig(weight=QTensorConfig(dtype="mutant_format", **spec))

    record = FormatRecord(name="mutant_format", bits=4, format=ObjectRef(Format()), capabilities={"zero_point"})
    scheme = SchemeRecord(name="mutant_ragged", summary="ragged groups", config=ObjectRef(build))
    result = run_check(subject_among("scheme", (scheme, record)), CHECK)
    assert result.outcome == ("passed" if message is None else "failed"), result.message
    assert (message or "") in result.message
