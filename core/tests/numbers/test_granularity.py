"""Granularities: rows hold the elements that share a scale, and lead back to the tensor."""

import pytest
import torch

from quark.config.enums import Dtype, QSchemeType
from quark.config.tensor import QTensorConfig
from quark.numbers import Granularity, PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from quark.numbers.granularity import granularity_of

CASES: dict[Granularity, tuple[tuple[int, ...], tuple[int, ...]]] = {
    PerTensor(): ((4, 8), ()),
    PerChannel(0): ((4, 8), (4,)),
    PerChannel(1): ((4, 8, 3), (8,)),
    PerChannel(-1): ((4, 8), (8,)),
    PerToken(): ((2, 5, 8), (2, 5)),
    PerGroup(4): ((3, 8), (3, 2)),
    PerGroup(-1): ((3, 8), (3, 1)),
    PerBlock((2, 4)): ((4, 8), (2, 2)),
    PerBlock((3, 4)): ((4, 8), (2, 2)),
}


@pytest.mark.parametrize("granularity", CASES, ids=repr)
def test_rows_are_as_many_as_scales_and_lead_back(granularity: Granularity) -> None:
    shape, scales = CASES[granularity]
    x = torch.arange(torch.Size(shape).numel()).float().reshape(shape)
    rows = granularity.rows(x)
    assert granularity.scale_shape(shape) == scales
    assert rows.shape[0] == torch.Size(scales).numel()
    assert torch.equal(granularity.restore(rows, shape), x)


@pytest.mark.parametrize("granularity", CASES, ids=repr)
def test_runs_say_where_the_scale_of_each_element_is(granularity: Granularity) -> None:
    shape, _ = CASES[granularity]
    elements = torch.arange(torch.Size(shape).numel())
    rows = granularity.rows(elements.reshape(shape))
    runs = granularity.runs(shape)
    assert runs is not None
    run = elements // runs.length
    number = run // runs.span * runs.period + run % runs.period
    scale_of = torch.arange(len(rows)).unsqueeze(1).expand_as(rows).contiguous()
    assert torch.equal(number.reshape(shape), granularity.restore(scale_of, shape))
    assert runs.have_own_scales == torch.equal(number, run)


MATRICES = [
    PerTensor(),
    PerChannel(0),
    PerChannel(-2),
    PerChannel(1),
    PerChannel(-1),
    PerToken(),
    PerGroup(4),
    PerGroup(-1),
    PerBlock((2, 4)),
]


@pytest.mark.parametrize("granularity", MATRICES, ids=repr)
def test_scales_spread_over_a_matrix_lie_where_their_rows_do_and_are_gathered_again(granularity: Granularity) -> None:
    shape = (4, 8)
    scale = torch.arange(1.0, 33)[: torch.Size(granularity.scale_shape(shape)).numel()].reshape(granularity.scale_shape(shape))
    spread = granularity.expand_scale(scale, shape)
    assert spread.shape[0] == 4
    elements = 32 // scale.numel()
    of_each_element = granularity.restore(scale.reshape(-1, 1).expand(-1, elements).contiguous(), shape)
    assert torch.equal(spread.repeat_interleave(8 // spread.shape[1], 1), of_each_element)
    assert torch.equal(granularity.reduce_scale(spread, shape), scale)


@pytest.mark.parametrize("axis", [1, -2])
def test_dynamic_activations_by_channels_of_the_token_axis_have_a_scale_for_each_token_at_any_rank(axis: int) -> None:
    def spec(*, dynamic: bool) -> QTensorConfig:
        return QTensorConfig(dtype=Dtype.int8, qscheme=QSchemeType.per_channel, ch_axis=axis, is_dynamic=dynamic, symmetric=True)

    assert granularity_of(spec(dynamic=True), activation=True) == PerToken()
    assert granularity_of(spec(dynamic=False), activation=True) == PerChannel(axis)
    assert granularity_of(spec(dynamic=True), activation=False) == PerChannel(axis)


def test_rows_of_a_block_are_its_elements() -> None:
    x = torch.arange(32).reshape(4, 8)
    assert PerBlock((2, 4)).rows(x)[1].tolist() == [4, 5, 6, 7, 12, 13, 14, 15]


@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(0), PerToken(), PerGroup(4)], ids=repr)
def test_rows_of_the_usual_granularities_are_views(granularity: Granularity) -> None:
    x = torch.zeros(4, 8)
    assert granularity.rows(x).data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    ("granularity", "shape"), [(PerGroup(3), (4, 8)), (PerBlock((4, 3)), (4, 8)), (PerBlock((2, 2)), (8,)), (PerChannel(2), (4, 8))]
)
def test_shapes_that_do_not_fit_are_told(granularity: Granularity, shape: tuple[int, ...]) -> None:
    assert granularity.shape_error(shape) is not None


@pytest.mark.parametrize(
    ("granularity", "columns"),
    [
        (PerTensor(), None),
        (PerChannel(0), 8),
        (PerChannel(-2), 8),
        (PerChannel(1), None),
        (PerChannel(-1), None),
        (PerToken(), 8),
        (PerGroup(4), 4),
        (PerGroup(-1), 8),
        (PerBlock((2, 4)), None),
    ],
)
def test_columns_that_share_a_scale_are_those_of_one_row(granularity: Granularity, columns: int | None) -> None:
    """A group of input channels can be rounded by itself only if no other row shares its scale."""
    assert granularity.columns_per_scale(8) == columns
    weight = torch.arange(32.0).reshape(4, 8)
    rows = {tuple((row // 8).unique().tolist()) for row in granularity.rows(weight)}
    assert (columns is not None) == all(len(row) == 1 for row in rows)
