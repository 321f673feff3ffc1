"""The codebook formats: codes are numbers of entries, entries are learned by what errors weigh, NaN stays."""

from __future__ import annotations

import pytest
import torch

from quark.numbers import PerGroup, quantizer_for
from quark.plugins import schemes
from quark_vq.codebook import VQ2, VQ3, Codebook, CodebookPacking
from quark_vq.learning import learned, nearest


def vectors(count: int, vector: int) -> torch.Tensor:
    return torch.randn(count, vector, generator=torch.Generator().manual_seed(0), dtype=torch.float32)


@pytest.mark.parametrize("number_format", [VQ2, VQ3], ids=lambda value: value.name)
def test_a_code_is_the_number_of_an_entry_in_parts(number_format: Codebook) -> None:
    entries = vectors(number_format.table_shape[0], number_format.vector)
    learned_format = number_format.with_table(entries)
    codes = learned_format.encode(entries.view(8, -1)).view(entries.shape).int()
    shifts = number_format.bits * torch.arange(number_format.vector)
    assert torch.equal((codes << shifts).sum(1), torch.arange(len(entries)))
    assert int(codes.max()) == (1 << number_format.bits) - 1
    assert torch.equal(learned_format.decode(learned_format.encode(entries.view(8, -1))), entries.view(8, -1))


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("columns", [4, 6, 8, 64, 100])
def test_packed_codes_fill_their_bits(bits: int, columns: int) -> None:
    codes = torch.randint(0, 1 << bits, (5, columns), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    packing = CodebookPacking(bits)
    packed = packing.pack(codes, PerGroup(4), "order")
    assert packed.shape == (5, -(-columns // 8) * bits)
    assert torch.equal(packing.unpack(packed, PerGroup(4), "order", (5, columns)), codes)


def test_nearest_is_nearest() -> None:
    x, entries = vectors(3000, 4), vectors(256, 4) * 0.9
    assert torch.equal(nearest(x, entries), torch.cdist(x.double(), entries.double()).argmin(1))


def test_entries_follow_what_counts() -> None:
    x = vectors(4000, 2)
    importance = torch.ones_like(x)
    importance[:, 0] = 100.0
    plain, weighted = (learned(x, one, 16) for one in (torch.ones_like(x), importance))
    assert torch.equal(plain, learned(x, torch.ones_like(x), 16))
    assert len(plain.unique(dim=0)) == 16
    assert bool((plain == 0).all(1).any())
    labels = nearest(x, weighted)
    moved = weighted[labels] - x
    assert float((moved**2).mean()) < 0.15
    half = x.abs().sum(1) < 1  # those that count alone are fitted
    only = learned(x, half[:, None].expand_as(x).float(), 16)
    assert float(((only[nearest(x, only)] - x)[half] ** 2).mean()) < 0.7 * float(((plain[nearest(x, plain)] - x)[half] ** 2).mean())


@pytest.mark.parametrize("count", [1, 3, 40])
def test_few_vectors_are_their_own_entries(count: int) -> None:
    x = vectors(count, 2)
    entries = learned(x, torch.ones_like(x), 64)
    assert bool(entries.isfinite().all())
    assert torch.equal(entries[nearest(x, entries)], x)


def test_vectors_that_are_not_finite_count_for_nothing() -> None:
    x = vectors(4000, 2)
    x[::50, 0], x[1::50, 1] = torch.nan, torch.inf
    assert bool(learned(x, torch.ones_like(x), 16).isfinite().all())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_importance_that_is_not_finite_counts_for_nothing(value: float) -> None:
    x, importance = vectors(4000, 2), torch.ones(4000, 2)
    importance[::50, 1] = value
    entries = learned(x, importance, 16)
    assert float((entries[nearest(x, entries)] - x).square().mean()) < 0.15


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("scheme", sorted(name for name in schemes().names() if name.startswith("vq")))
def test_a_value_that_is_not_finite_spoils_its_own_scale_alone(scheme: str, value: float) -> None:
    quantizer = quantizer_for(schemes().load_config(scheme)().weight, activation=False)
    x = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    spoiled = x.clone()
    spoiled[3, 5] = value
    rounded, expected = quantizer.fake_quantize(spoiled), quantizer.fake_quantize(x)
    others = torch.ones_like(x, dtype=torch.bool)
    others[3, : 64 if scheme.endswith("g64") else 128] = False
    assert torch.equal(rounded.isfinite(), others)
    assert float((rounded - x)[others].square().mean()) < 1.02 * float((expected - x)[others].square().mean())


def test_rounding_in_a_metric_takes_the_entry_of_least_error_in_it() -> None:
    entries, t = vectors(256, 4), vectors(500, 4) * 0.8
    root = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))
    metric = root @ root.t() + 0.1 * torch.eye(4)
    rounded = VQ2.with_table(entries).round_in_(t.clone(), metric)
    error = entries - t[:, None]
    best = torch.einsum("nkv,vw,nkw->nk", error, metric, error).argmin(1)
    assert torch.equal(rounded, entries[best])


@pytest.mark.parametrize(("scheme", "bits"), [("vq2", 2.0), ("vq3", 3.0), ("vq2_g64", 2.25), ("vq3_g64", 3.25)])
def test_a_stored_weight_has_the_bits_of_its_codes_scales_and_codebook(scheme: str, bits: float) -> None:
    quantizer = quantizer_for(schemes().load_config(scheme)().weight, activation=False)
    shape = (1024, 1024)
    stored = quantizer.pack(*quantizer.empty_codes(shape))
    table = 16 * quantizer.stored_level.format.table_shape[0] * quantizer.stored_level.format.table_shape[1]  # type: ignore[index]
    scales = 0 if "g64" in scheme else 16 * 1024
    assert sum(8 * tensor.nbytes for tensor in stored.values()) == bits * 2**20 + table + scales
