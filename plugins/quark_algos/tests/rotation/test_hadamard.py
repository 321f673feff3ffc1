"""Hadamard matrices are orthogonal, fast products equal dense ones, rotations equal their matrices."""

from __future__ import annotations

import pytest
import torch

from quark.errors import ConfigError
from quark_algos.rotation.hadamard import Rotation, factors_of, largest_order, transform
from quark_algos.rotation.paley import WILLIAMSON, hadamard, has_order

DOCUMENTED = (12, 20, 28, 36, 40, 52, 60, 108, 140, 172)
"""Orders that the reference has tables for, but 156."""
OF_MODELS = {576: 576, 1536: 1536, 3584: 3584, 4096: 4096, 8960: 8960, 11008: 11008, 13824: 13824, 14336: 14336, 18944: 18944, 29568: 29568}
"""Widths in use, and the largest blocks they take."""
WITHOUT = {156, 188, 236, 260, 268, 292, 324, 356, 372, 376, 404, 412, 428, 436, 452, 472, 476, 508}
EXACT = 2**-48
"""Sums of up to some hundred products in float64, relative to their size."""


def matrix_of(rotation: Rotation) -> torch.Tensor:
    """Return R, ``[width, width]``, float64."""
    return rotation.apply(torch.eye(rotation.width, dtype=torch.float64))


def identity(order: int) -> torch.Tensor:
    return torch.eye(order, dtype=torch.float64)


def test_every_small_matrix_is_orthogonal_with_a_first_column_of_ones() -> None:
    orders = [m for m in range(1, 513) if has_order(m)]
    assert {4 * n for n in WILLIAMSON} <= set(orders)
    for m in orders:
        h = hadamard(m)
        assert torch.equal(h.abs(), torch.ones_like(h)), m
        assert torch.equal(h @ h.t(), m * identity(m)), m
        assert torch.equal(h[:, 0], torch.ones(m, dtype=torch.float64)), m


def test_every_product_is_orthogonal() -> None:
    orders = [k for k in range(1, 513) if factors_of(k) is not None]
    assert [k for k in range(4, 513, 4) if k not in orders] == sorted(WITHOUT)
    assert [k for k in orders if k % 4] == [1, 2]
    for k in orders:
        forth = transform(identity(k), k)
        assert torch.equal(transform(forth, k, transposed=True), k * identity(k)), k
        assert torch.equal(forth.t(), transform(identity(k), k, transposed=True)), k


@pytest.mark.parametrize("order", DOCUMENTED)
@pytest.mark.parametrize("doublings", [0, 1, 5])
def test_documented_orders_are_there(order: int, doublings: int) -> None:
    assert largest_order(order << doublings) == order << doublings


@pytest.mark.parametrize("order", [1, 2, 4, 8, 32, 64, 256])
def test_powers_of_two_are_sylvester_matrices(order: int) -> None:
    expected = torch.ones(1, 1, dtype=torch.float64)
    while len(expected) < order:
        expected = torch.cat([torch.cat([expected, expected], 1), torch.cat([expected, -expected], 1)])
    assert torch.equal(transform(identity(order), order), expected)


@pytest.mark.parametrize("width", OF_MODELS)
def test_widths_of_models_rotate_whole_and_back(width: int) -> None:
    rotation = Rotation.of(width, seed=1)
    assert rotation.block == OF_MODELS[width]
    x = torch.randn(2, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = rotation.apply(x)
    assert float((y - x).abs().max()) > 0.1
    torch.testing.assert_close(y @ y.t(), x @ x.t(), rtol=0, atol=EXACT * width)


@pytest.mark.parametrize(("width", "block"), [(7, 1), (6, 2), (156, 52), (188, 4), (100, 100), (2 * 47 * 8, 752), (24, 24)])
def test_where_there_is_no_matrix_the_largest_that_divides_is_taken(width: int, block: int) -> None:
    rotation = Rotation.of(width)
    assert rotation.block == block
    matrix = matrix_of(rotation)
    torch.testing.assert_close(matrix @ matrix.t(), identity(width), rtol=0, atol=EXACT * 16)
    outside = torch.block_diag(*[torch.ones(block, block)] * (width // block)) == 0
    assert bool((matrix[outside] == 0).all())
    assert bool((matrix[~outside] != 0).all())


@pytest.mark.parametrize("keeps_mean", [False, True])
@pytest.mark.parametrize(("width", "size"), [(96, None), (96, 32), (60, 12), (64, 64)])
def test_a_rotation_is_its_matrix(width: int, size: int | None, keeps_mean: bool) -> None:
    rotation = Rotation.of(width, size, seed=3, keeps_mean=keeps_mean)
    matrix = matrix_of(rotation)
    x = torch.randn(2, 3, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(matrix @ matrix.t(), identity(width), rtol=0, atol=EXACT * 16)
    torch.testing.assert_close(rotation.apply(x), x @ matrix, rtol=0, atol=EXACT * 16)


@pytest.mark.parametrize("size", [None, 32])
def test_a_rotation_that_keeps_the_mean_commutes_with_layer_norm_and_spreads_outliers_all_the_same(size: int | None) -> None:
    rotation = Rotation.of(1536, size, keeps_mean=True)
    x = torch.randn(4, 1536, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    x[:, 7] += 200

    def norm(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (1536,))

    torch.testing.assert_close(norm(rotation.apply(x)), rotation.apply(norm(x)), rtol=0, atol=EXACT * 1536)
    peak = x.abs().amax(-1) / rotation.apply(x).abs().amax(-1)
    assert float(peak.min()) > (rotation.block**0.5) / 5
    plain = Rotation.of(1536, size, seed=0)
    assert float((norm(plain.apply(x)) - plain.apply(norm(x))).abs().max()) > 1e-3


def test_signs_are_random_by_their_seed_and_are_a_factor_of_the_matrix() -> None:
    one, same, other = Rotation.of(48, seed=5), Rotation.of(48, seed=5), Rotation.of(48, seed=6)
    assert torch.equal(matrix_of(one), matrix_of(same))
    assert not torch.equal(matrix_of(one), matrix_of(other))
    assert one.signs is not None
    assert set(one.signs.tolist()) == {-1, 1}
    assert torch.equal(matrix_of(one), one.signs.double()[:, None] * matrix_of(Rotation.of(48)))


@pytest.mark.parametrize("keeps_mean", [False, True])
def test_sixteen_bits_are_rounded_once(keeps_mean: bool) -> None:
    rotation = Rotation.of(192, seed=2, keeps_mean=keeps_mean)
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = rotation.apply(x.float()).bfloat16()
    assert rotation.apply(x).dtype is torch.bfloat16
    assert torch.equal(rotation.apply(x), expected)


@pytest.mark.parametrize("order", [1, 2, 12, 64])
def test_what_is_rotated_is_not_written_to(order: int) -> None:
    x = torch.randn(3, order, generator=torch.Generator().manual_seed(0))
    before, rotation = x.clone(), Rotation.of(order)
    rotation.apply(x).zero_()
    transform(x, order).zero_()
    assert torch.equal(x, before)


def test_sizes_that_cannot_be_are_refused_with_what_can() -> None:
    with pytest.raises(ConfigError, match="not a multiple of rotation_size"):
        Rotation.of(96, 36)
    with pytest.raises(ConfigError, match="Choose 52"):
        Rotation.of(312, 156)
    with pytest.raises(ConfigError, match="blocks of 4"):
        transform(torch.zeros(188), 188)
    with pytest.raises(ConfigError, match=r"\(2, 95\)"):
        Rotation.of(96).apply(torch.zeros(2, 95))
    with pytest.raises(ConfigError, match="signs of shape"):
        Rotation(96, 32, torch.ones(32, dtype=torch.int8))
    with pytest.raises(ValueError, match="order 188"):
        hadamard(188)
