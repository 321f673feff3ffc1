"""The grid of stacked weights agrees with each layer's own quantizer, for every scheme and column."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import quark
from quark.config.layer import TensorSpec
from quark.config.tensor import QTensorConfig
from quark.numbers import QParams, WeightGrid, number_format, quantizer_for
from quark.numbers.progressive import ProgressiveQuantizer
from quark_devkit.checks.format.cases import all_values
from quark_devkit.example_specs import Example, examples

ROWS = (48, 16)
K = 256


def has_table(spec: TensorSpec) -> bool:
    return quantizer_for(spec, activation=False).stored_level.format.table_shape is not None


SCHEMES = [n for n in quark.schemes().names() if (weight := quark.schemes().load_config(n)().weight) is not None and not has_table(weight)]
"""Those of which a grid holds several layers."""


def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, K, generator=generator) * 0.05 * (1 + i) for i, rows in enumerate(ROWS)]


def transposed(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts).t().contiguous()


def grid_of(spec: QTensorConfig, *, shared: bool = False) -> WeightGrid:
    quantizer = quantizer_for(spec, activation=False)
    return WeightGrid([quantizer, quantizer], ROWS, transposed(weights()), shared=shared)


def same(a: QParams, b: QParams) -> bool:
    ours, theirs = dict(a.items()), dict(b.items())
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) and ours[n].dtype == theirs[n].dtype for n in ours)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scales_and_values_are_those_of_round_to_nearest(scheme: str) -> None:
    spec = quark.schemes().load_config(scheme)().weight
    grid, quantizer = grid_of(spec), quantizer_for(spec, activation=False)
    wt = transposed(weights())
    scales = grid.fixed or grid.scales(wt)
    expected = [quantizer.find_qparams(w) for w in weights()]
    assert all(same(a, b) for a, b in zip(grid.qparams(scales), expected, strict=True))
    values = grid.round_(wt.clone(), grid.with_subscales(wt, scales)).t().split(ROWS)
    for value, w, qparams in zip(values, weights(), expected, strict=True):
        codes = quantizer.codes_of(value.contiguous(), qparams)
        if not isinstance(quantizer, ProgressiveQuantizer):  # which rounds twice
            assert torch.equal(codes, quantizer.quantize(w, qparams))
        torch.testing.assert_close(value, quantizer.dequantize(codes, qparams), rtol=2**-22, atol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_error_is_what_rounding_takes_away(scheme: str) -> None:
    grid, wt = grid_of(quark.schemes().load_config(scheme)().weight), transposed(weights())
    scales = grid.with_subscales(wt, grid.fixed or grid.scales(wt))
    out = torch.empty_like(wt)
    found, rounded = grid.error(wt, scales, out), grid.round_(wt.clone(), scales)
    assert found.data_ptr() == out.data_ptr()
    assert found.shape == wt.shape
    torch.testing.assert_close(wt - found, rounded, rtol=1e-6, atol=1e-7)
    assert torch.equal(wt, transposed(weights()))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_are_exactly_the_values_of_their_codes(scheme: str) -> None:
    spec = quark.schemes().load_config(scheme)().weight
    grid, quantizer = grid_of(spec), quantizer_for(spec, activation=False)
    wt = transposed(weights())
    scales = grid.fixed or grid.scales(wt)
    for values, qparams, _ in grid.weights(grid.round_(wt.clone(), grid.with_subscales(wt, scales)), scales):
        assert torch.equal(values, quantizer.dequantize(quantizer.codes_of(values, qparams), qparams))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_column_by_itself_is_rounded_as_in_the_whole(scheme: str) -> None:
    grid = grid_of(quark.schemes().load_config(scheme)().weight)
    wt = transposed(weights())
    scales = grid.fixed or grid.scales(wt)
    whole = grid.round_(wt.clone(), grid.with_subscales(wt, scales))
    each = grid.with_subscales(wt, scales) if grid.has_subscales else scales.expanded(grid.group)
    rounded = grid.rounder(each)
    for k in (0, 1, 77, K - 1):
        assert torch.equal(rounded(wt[k].clone(), k), whole[k])
        assert torch.equal(grid.round_(wt[k].clone(), each.at(k)), whole[k])


def test_layers_that_share_an_outer_scale_have_the_scales_of_the_larger() -> None:
    spec = quark.schemes().load_config("nvfp4")().weight
    grid, quantizer = grid_of(spec, shared=True), quantizer_for(spec, activation=False)
    observer = quantizer.observer()
    for w in weights():
        observer.observe(w)
    expected = [quantizer.find_qparams(w, observer) for w in weights()]
    assert all(same(a, b) for a, b in zip(grid.qparams(grid.scales(transposed(weights()))), expected, strict=True))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scales_of_some_rows_are_those_of_the_whole(scheme: str) -> None:
    grid = grid_of(quark.schemes().load_config(scheme)().weight)
    wt = transposed(weights())
    if grid.fixed is None:
        part = slice(40, 60)
        assert torch.equal(grid.of_rows(part).scales(wt[:, part].contiguous()).scale, grid.scales(wt).scale[:, part])


@pytest.mark.parametrize("scheme", ["int4_fp8", "nvfp4", "int4_wo_32", "int4_wo_per_channel"])
def test_scales_of_ranges_are_rounded_only_as_they_are_stored(scheme: str) -> None:
    """A search tries ranges 2.5 % apart, finer than E4M3; int4_fp8 keeps its second scale in float32."""
    spec = quark.schemes().load_config(scheme)().weight
    grid, wt = grid_of(spec), transposed(weights())
    low, high = grid.ranges(wt)
    first, finer = grid.scales_of_ranges(low, high).scale, grid.scales_of_ranges(low * 1.01, high * 1.01).scale
    if scheme == "nvfp4":
        assert torch.isin(
            grid.scales_of_ranges(low, high).stored, torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        ).all()
    else:
        torch.testing.assert_close(first, high / grid.max_magnitude, rtol=2**-22, atol=0)
        torch.testing.assert_close(finer / first, torch.full_like(first, 1.01), rtol=2**-20, atol=0)


def level(dtype: str, **more: object) -> QTensorConfig:
    return QTensorConfig(dtype=dtype, is_dynamic=False, symmetric=True, **{"qscheme": "per_tensor", **more})  # type: ignore[arg-type]


SPANNING = {
    "quantized scales of two-dimensional blocks": (
        level("fp4", qscheme="per_block", block_size=(4, 16), scale_type="float32"),
        level("fp8_e4m3", is_scale_quant=True),
    ),
    "one scale twice": (level("fp8_e4m3"), level("int4")),
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("spec", SPANNING.values(), ids=SPANNING)
def test_scales_that_span_rows_under_an_outer_scale_are_those_of_round_to_nearest(spec: tuple[QTensorConfig, ...], shared: bool) -> None:
    grid, quantizer = grid_of(spec, shared=shared), quantizer_for(spec, activation=False)
    observer = quantizer.observer() if shared else None
    for w in weights() if observer is not None else ():
        observer.observe(w)
    expected = [quantizer.find_qparams(w, observer) for w in weights()]
    assert grid.fixed is not None
    assert all(same(a, b) for a, b in zip(grid.qparams(grid.fixed), expected, strict=True))


def formats_of_weights() -> dict[str, Example]:
    """A spec of each registered format whose elements have scales."""
    found = [
        e for e in examples(quark.formats().names()) if not e.quantizer.is_float and not e.spec.is_scale_quant and not has_table(e.spec)
    ]
    return {e.quantizer.stored_level.format.element_format().name: e for e in found}


@pytest.mark.parametrize("example", formats_of_weights().values(), ids=formats_of_weights())
def test_the_gap_is_that_between_the_two_largest_magnitudes(example: Example) -> None:
    element = example.quantizer.stored_level.format.element_format()
    values = all_values(element)
    gap = WeightGrid([example.quantizer], [sum(ROWS)], transposed(weights())).gap
    if values is None:  # more than can be listed
        assert gap == pytest.approx(1.0, rel=2**-11)
        return
    magnitudes = values[element.round_(values.clone()) == values].abs().unique()  # codes of fractional bits are not all used
    expected = float(magnitudes[-1] / magnitudes[-2]) if len(magnitudes) > 2 else 1.0
    # Of formats with more values than are probed, one that is near the largest is next.
    assert gap == pytest.approx(expected, rel=1e-6 if len(magnitudes) < 4096 else 2**-11)


@pytest.mark.parametrize(("top", "wanted"), [(1, 1.0), (2, 2.0), (3, 1.5)])
def test_the_gap_of_a_format_of_few_values(top: int, wanted: float) -> None:
    sound: Any = number_format("int4")

    class Few(type(sound)):  # type: ignore[misc]
        def round_(self, t: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
            return t.round_().clamp_(-top, top)

    grid = grid_of(quark.schemes().load_config("int4_wo_32")().weight)
    grid._element_format = Few(name="few", bits=4, signed=True, storage_dtype=torch.int8, packing=sound.packing)
    assert grid.gap == wanted


def test_channels_with_scales_of_their_own_are_rounded_by_them_from_the_first_on() -> None:
    grid = grid_of(quark.schemes().load_config("int4_wo_32")().weight)
    wt = transposed(weights())
    each = grid.scales(wt).expanded(grid.group)
    some = each.map(lambda x: x[40:80])
    rounded, whole = grid.rounder(some, first=40), grid.round_(wt.clone(), grid.scales(wt))
    for k in (40, 41, 79):
        assert torch.equal(rounded(wt[k].clone(), k), whole[k])


@pytest.mark.parametrize(
    ("scheme", "expected"), [("fp8", True), ("int4_wo_32", False), ("nvfp4", True), ("mxfp4", False), ("int4_fp8", True)]
)
def test_a_tensor_scale_is_one_that_spans_the_whole_tensor(scheme: str, expected: bool) -> None:
    assert quantizer_for(quark.schemes().load_config(scheme)().weight, activation=False).has_tensor_scale is expected
