"""Granularities: rows hold the elements that share a scale, and lead back to the tensor."""

import pytest
import torch

from quark.numerics import Granularity, PerBlock, PerChannel, PerGroup, PerTensor, PerToken

CASES: dict[Granularity, tuple[tuple[int, ...], tuple[int, ...]]] = {
    PerTensor(): ((4, 8), ()),
    PerChannel(0): ((4, 8), (4,)),
    PerChannel(1): ((4, 8, 3), (8,)),
    PerChannel(-1): ((4, 8), (8,)),
    PerToken(): ((2, 5, 8), (2, 5)),
    PerGroup(4): ((3, 8), (3, 2)),
    PerGroup(-1): ((3, 8), (3, 1)),
    PerBlock((2, 4)): ((4, 8), (2, 2)),
}


@pytest.mark.parametrize("granularity", CASES, ids=repr)
def test_rows_are_as_many_as_scales_and_lead_back(granularity: Granularity) -> None:
    shape, scales = CASES[granularity]
    x = torch.arange(torch.Size(shape).numel()).float().reshape(shape)
    rows = granularity.rows(x)
    assert granularity.scale_shape(shape) == scales
    assert rows.shape[0] == torch.Size(scales).numel()
    assert torch.equal(granularity.restore(rows, shape), x)


def test_rows_of_a_block_are_its_elements() -> None:
    x = torch.arange(32).reshape(4, 8)
    assert PerBlock((2, 4)).rows(x)[1].tolist() == [4, 5, 6, 7, 12, 13, 14, 15]


@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(0), PerToken(), PerGroup(4)], ids=repr)
def test_rows_of_the_usual_granularities_are_views(granularity: Granularity) -> None:
    x = torch.zeros(4, 8)
    assert granularity.rows(x).data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    ("granularity", "shape"), [(PerGroup(3), (4, 8)), (PerBlock((3, 4)), (4, 8)), (PerBlock((2, 2)), (8,)), (PerChannel(2), (4, 8))]
)
def test_shapes_that_do_not_fit_are_told(granularity: Granularity, shape: tuple[int, ...]) -> None:
    assert granularity.problem(shape) is not None
