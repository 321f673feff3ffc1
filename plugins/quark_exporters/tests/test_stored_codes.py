"""`quark_exporters.stored_codes`.

Which elements share a scale, for any shapes, against a loop over elements.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quark.errors import CheckpointError
from quark_exporters.stored_codes import ScaleBlocks


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_each_element_gets_the_scale_and_zero_point_of_its_block(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    block = data.draw(st.tuples(st.integers(1, 8), st.integers(1, 8)))
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    codes = torch.randint(-8, 8, (rows, columns), generator=generator, dtype=torch.int8)
    scale = torch.rand(grid, generator=generator)
    zero_point = torch.randint(-8, 8, grid, generator=generator, dtype=torch.int8)
    values = ScaleBlocks.of("w", (rows, columns), grid, block).values(codes, scale, zero_point, torch.float32)
    expected = np.empty((rows, columns), dtype=np.float32)
    for i in range(rows):
        for j in range(columns):
            at = i // block[0], j // block[1]
            expected[i, j] = np.float32(int(codes[i, j]) - int(zero_point[at])) * np.float32(scale[at].item())
    assert np.array_equal(values.numpy(), expected)


@pytest.mark.parametrize(
    ("shape", "scale", "expected"),
    [
        ((4, 6), (), (4, 6)),
        ((4, 6), (1,), (4, 6)),
        ((4, 6), (4,), (1, 6)),
        ((4, 6), (4, 1), (1, 6)),
        ((4, 6), (4, 3), (1, 2)),
        ((4, 6), (2, 3), (2, 2)),
        ((3, 4, 6), (3,), (4, 6)),
        ((3, 4, 6), (3, 1, 1), (4, 6)),
        ((3, 4, 6), (1, 1, 1), (4, 6)),
        ((3, 4, 6), (3, 4), (1, 6)),
        ((3, 4, 6), (3, 2, 3), (2, 2)),
    ],
)
def test_blocks_follow_from_the_shapes(shape: tuple[int, ...], scale: tuple[int, ...], expected: tuple[int, int]) -> None:
    blocks = ScaleBlocks.of("w", shape, scale)
    assert (blocks.rows, blocks.columns) == expected
    scales = 1 + torch.arange(float(np.prod(scale, dtype=int))).reshape(scale)
    values = blocks.values(torch.ones(shape, dtype=torch.int8), scales, None, torch.float32)
    distinct = {tuple(part.unique().tolist()) for part in (values if len(shape) == 3 else values[None])}
    assert sorted(v for part in distinct for v in part) == sorted(scales.flatten().tolist())


@pytest.mark.parametrize(("shape", "scale"), [((4, 6), (3,)), ((4, 6), (3, 1)), ((4, 6), (4, 0)), ((4,), (4,)), ((3, 4, 6), (2, 4, 6))])
def test_scales_that_do_not_fit_are_refused(shape: tuple[int, ...], scale: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match=r"'w' has the shape .* scales"):
        ScaleBlocks.of("w", shape, scale)


def test_scales_in_bytes_are_powers_of_two() -> None:
    scale = torch.tensor([[0], [127], [130], [254]], dtype=torch.uint8)
    values = ScaleBlocks.of("w", (4, 2), (4, 1)).values(torch.ones(4, 2, dtype=torch.int8), scale, None, torch.float32)
    assert values[:, 0].tolist() == [2.0**-127, 1.0, 8.0, 2.0**127]


def test_scales_in_bytes_are_powers_of_two_and_the_largest_byte_is_no_number() -> None:
    blocks = ScaleBlocks.of("w", (3, 2), (3, 1))
    values = blocks.values(torch.ones(3, 2), torch.tensor([[127], [126], [255]], dtype=torch.uint8), None, torch.float32)
    assert values[:2].tolist() == [[1.0, 1.0], [0.5, 0.5]]
    assert bool(values[2].isnan().all())
