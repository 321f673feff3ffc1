"""Formats whose codes stand for several neighbouring elements, and formats with a table for each weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import attrs
import pytest
import torch
from torch import Tensor

from quark.base.lazy import ObjectRef
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError, PluginError
from quark.models.layers import QuantizerModule
from quark.numbers import NumberFormat, PerChannel, QParams, WeightGrid, quantizer_for
from quark.numbers.on_grid import qparams_of_rows, scale_values_error, scales_error
from quark.numbers.self_check import refuse_broken
from quark.plugins import FormatRecord, formats


class EvenSums(NumberFormat):
    """Pairs of whole numbers from -3 to 4 whose sum is even: the lattice D2, nearest in each pair."""

    name = "even_sums"
    bits = 3
    vector = 2
    storage_dtype = torch.uint8

    def max_magnitude(self, spec: QTensorConfig) -> float:
        return 4.0

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        pairs = t.reshape(-1, 2)
        whole = pairs.round().clamp(-3, 4)
        rest = pairs - whole
        worse = rest.abs().argmax(1, keepdim=True)
        step = torch.where(rest.gather(1, worse) >= 0, 1.0, -1.0)
        step = torch.where((whole.gather(1, worse) + step - 0.5).abs() > 3.5, -step, step)
        is_odd = whole.sum(1, keepdim=True) % 2 != 0
        found = torch.where(is_odd, whole.scatter_add(1, worse, step), whole)
        return t.copy_(torch.where(pairs.isnan(), pairs, found).view(t.shape))

    def encode(self, t: Tensor) -> Tensor:
        return (t + 3).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        return codes.float() - 3


@attrs.frozen(kw_only=True, eq=False)
class Tabled(NumberFormat):
    """The values of a table of four numbers, some of them negative, learned as quantiles."""

    name: str = "tabled"
    bits: int = 2
    storage_dtype: torch.dtype = torch.uint8
    table_shape: tuple[int, ...] = (4,)
    values: Tensor | None = None
    importance: ClassVar[list[Tensor]] = []

    def max_magnitude(self, spec: QTensorConfig) -> float:
        return 1.0

    def learned_table(self, t: Tensor, importance: Tensor) -> Tensor:
        self.importance.append(importance)
        return torch.quantile(t.flatten()[:1000], torch.tensor([0.1, 0.4, 0.6, 0.9]))

    def with_table(self, table: Tensor) -> NumberFormat:
        return attrs.evolve(self, values=table)

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return t.copy_(torch.where(t.isnan(), t, self.decode(self.encode(t))))

    def encode(self, t: Tensor) -> Tensor:
        assert self.values is not None
        return (t[..., None].clamp(-1e9, 1e9) - self.values).abs().argmin(-1).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        assert self.values is not None
        return self.values[codes.int()]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    for name, value in (("even_sums", EvenSums()), ("tabled", Tabled())):
        formats().register(FormatRecord(name=name, bits=value.bits, format=ObjectRef(value)))
    yield
    for name in ("even_sums", "tabled"):
        formats().unregister(name)


def spec(dtype: str, **fields: Any) -> QTensorConfig:
    place = {"qscheme": "per_group", "ch_axis": -1, "group_size": 16, **fields}
    return QTensorConfig(dtype=dtype, symmetric=True, is_dynamic=False, **place)


def weight(rows: int = 12, columns: int = 64) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float32)


@pytest.mark.parametrize("dtype", ["even_sums", "tabled"])
def test_codes_values_and_packing_agree(dtype: str) -> None:
    quantizer = quantizer_for(spec(dtype), activation=False)
    refuse_broken(quantizer, activation=False)
    w = weight()
    qparams = quantizer.find_qparams(w)
    codes = quantizer.quantize(w, qparams)
    values = quantizer.dequantize(codes, qparams)
    assert torch.equal(values, quantizer.fake_quantize(w, qparams))
    assert torch.equal(values, quantizer.round_to_nearest(w)[0])
    unpacked, scales = quantizer.unpack(quantizer.pack(codes, qparams), tuple(w.shape))
    assert torch.equal(values, quantizer.dequantize(unpacked, scales))
    empty = dict(quantizer.empty_qparams(tuple(w.shape), "cpu").items())
    assert {name: tensor.shape for name, tensor in qparams.items()} == {name: tensor.shape for name, tensor in empty.items()}


def test_pairs_are_rounded_together_wherever_tiles_end() -> None:
    quantizer = quantizer_for(spec("even_sums"), activation=False)
    codes = quantizer.quantize(weight(), quantizer.find_qparams(weight())).int()
    assert not bool((codes.view(-1, 2).sum(1) % 2).any())
    long = weight(1, 1 << 19)
    tensor = quantizer_for(spec("even_sums", qscheme="per_tensor", ch_axis=None, group_size=None), activation=False)
    assert not bool((tensor.quantize(long, tensor.find_qparams(long)).int().view(-1, 2).sum(1) % 2).any())


@pytest.mark.parametrize(
    ("place", "shape", "fits"),
    [
        ({}, (4, 64), True),
        ({"group_size": 15}, (4, 60), False),
        ({"qscheme": "per_channel", "ch_axis": 0, "group_size": None}, (4, 7), False),
        ({"qscheme": "per_channel", "ch_axis": 1, "group_size": None}, (4, 8), False),
        ({"qscheme": "per_tensor", "ch_axis": None, "group_size": None}, (3, 8), True),
    ],
)
def test_a_vector_lies_in_a_row_under_one_scale(place: dict[str, Any], shape: tuple[int, ...], fits: bool) -> None:
    error = quantizer_for(spec("even_sums", **place), activation=False).shape_error(shape)
    assert (error is None) is fits, error
    assert fits or "together" in str(error)


def test_a_grid_rounds_runs_of_columns() -> None:
    quantizer = quantizer_for(spec("even_sums"), activation=False)
    wt = weight().t().contiguous()
    grid = WeightGrid([quantizer], [12], wt)
    scales = grid.scales(wt)
    whole = grid.round_(wt.clone(), scales)
    assert grid.vector == 2
    assert torch.equal(whole.t(), quantizer.fake_quantize(weight()))
    rounded, order = grid.rounder(scales), torch.arange(64).view(-1, 2).flip(0).flatten()
    for k in (0, 2, 30, 62):
        assert torch.equal(rounded(wt[k : k + 2].clone(), k), whole[k : k + 2])
        place = order[k : k + 2]
        assert torch.equal(grid.rounder(scales, order)(wt[place].clone(), k), whole[place])
    ((values, qparams, codes),) = grid.weights(whole, scales, torch.bfloat16)
    assert codes is not None
    assert torch.equal(codes, quantizer.quantize(weight(), qparams))
    assert torch.equal(values, quantizer.dequantize(codes, qparams).bfloat16())


def test_a_table_is_learned_once_for_a_weight_by_what_its_errors_weigh() -> None:
    quantizer = quantizer_for(spec("tabled"), activation=False)
    w, moments = weight(), torch.rand(64, generator=torch.Generator().manual_seed(1))
    scale = quantizer.find_qparams(w).scale.repeat_interleave(16, 1)
    grid = WeightGrid([quantizer], [12], w.t().contiguous(), importance=moments)
    torch.testing.assert_close(Tabled.importance[-2], scale.square() / scale.max() ** 2)
    torch.testing.assert_close(Tabled.importance[-1], scale.square() / scale.max() ** 2 * moments)
    (qparams,) = grid.qparams(grid.scales(w.t().contiguous()))
    assert qparams.table is not None
    assert bool((qparams.table < 0).any())
    assert torch.equal(qparams.table, grid.table)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Make one WeightGrid for each layer"):
        WeightGrid([quantizer, quantizer], [6, 6], w.t().contiguous())


@pytest.mark.parametrize("shape", [(64,), (2, 4, 64)])
def test_a_table_is_learned_from_a_matrix(shape: tuple[int, ...]) -> None:
    assert "is not a matrix" in str(quantizer_for(spec("tabled"), activation=False).shape_error(shape))


def test_scales_whose_squares_overflow_weigh_as_much() -> None:
    quantizer = quantizer_for(spec("tabled"), activation=False)
    small, large = (quantizer.find_qparams(weight() * factor).table for factor in (1.0, 2.0**100))
    assert torch.equal(small, large)  # type: ignore[arg-type]
    assert bool(Tabled.importance[-1].isfinite().all())


def test_a_table_belongs_to_all_rows_and_may_have_any_sign() -> None:
    table = torch.tensor([-1.0, -0.5, 0.0, 2.0])
    qparams = QParams(torch.ones(12, 4), table=table)
    assert qparams_of_rows(PerChannel(0), (12, 4), QParams(torch.ones(12), table=table), slice(2, 5)).table is table
    assert scale_values_error(qparams) is None
    assert scale_values_error(attrs.evolve(qparams, table=table * torch.nan)) == "has a table that holds NaN or Inf"
    quantizer = quantizer_for(spec("tabled"), activation=False)
    assert "table" in str(scales_error(quantizer, attrs.evolve(qparams, table=table[:3]), (12, 64)))
    assert "table" in str(scales_error(quantizer, QParams(torch.ones(12, 4)), (12, 64)))


def test_a_quantizer_in_a_model_keeps_its_table() -> None:
    module = QuantizerModule(spec("tabled"), activation=False)
    qparams = module.quantizer.find_qparams(weight())
    module.set_qparams(qparams)
    assert torch.equal(module.state_dict()["table"], qparams.table)  # type: ignore[arg-type]
    assert torch.equal(module(weight()), module.quantizer.fake_quantize(weight(), qparams))


@pytest.mark.parametrize(
    ("specs", "activation"),
    [(spec("tabled"), True), ((spec("tabled"), spec("int8")), False)],
)
def test_a_table_is_for_weights_of_one_level(specs: Any, activation: bool) -> None:
    with pytest.raises(ConfigError, match="tabled learns a table from a whole weight"):
        quantizer_for(specs, activation=activation)


@pytest.mark.parametrize(
    ("table", "wanted"), [(torch.zeros(3), "table_shape"), (torch.zeros(4, dtype=torch.float64), "float32"), (None, "table_shape")]
)
def test_a_format_that_learns_another_table_is_refused(table: Tensor | None, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tabled, "learned_table", lambda self, t, importance: table)
    with pytest.raises(PluginError, match=wanted):
        refuse_broken(quantizer_for(spec("tabled", group_size=32), activation=False), activation=False)
