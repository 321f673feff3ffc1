"""The functions that runtimes import to emulate MX formats.

Equal to our own quantizers, by the worked examples of the reference, and traceable.
"""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quark.config.enums import Dtype
from quark.errors import ConfigError, UnsupportedError
from quark.numbers import TensorQuantizer, quantizer_for
from quark.torch.kernel import mx
from quark.torch.kernel.hw_emulation.hw_emulation_interface import (
    dequantize_fp4_fp6_per_group,
    fake_quantize_fp4_fp6_per_group_with_scale,
)
from quark.torch.quantization.utils import even_round, reshape_to_blocks
from quark.torch.utils.pack import create_pack_method
from quark_schemes.specs.microscaling import OCP_MXFP4Spec, OCP_MXFP6E2M3Spec, OCP_MXFP6E3M2Spec

SPECS = {"fp4": OCP_MXFP4Spec, "fp6_e2m3": OCP_MXFP6E2M3Spec, "fp6_e3m2": OCP_MXFP6E3M2Spec}
BITS = {"fp4": 4, "fp6_e2m3": 6, "fp6_e3m2": 6}
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(64,), (5, 96), (2, 3, 64), (2, 1, 3, 32), (3, 40), (0, 64)]
AXES = [((64, 3), 0), ((2, 40, 3), 1), ((2, 40, 3), -2), ((2, 3, 33), -1), ((7,), 0)]


def quantizer(name: str, mode: str = "even") -> TensorQuantizer:
    return quantizer_for(SPECS[name](ch_axis=-1, is_dynamic=True, scale_calculation_mode=mode).to_quantization_spec(), activation=True)


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of many magnitudes, of both signs, with zeros, whole blocks of them among these."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=source) * torch.exp2(torch.randint(-9, 9, shape, generator=source).float())
    x = x * (torch.rand(shape, generator=source) > 0.1)
    return torch.cat((x[: x.shape[0] // 2], 0 * x[:1], x[x.shape[0] // 2 + 1 :])).to(dtype) if x.dim() > 1 and len(x) else x.to(dtype)


def same(found: Tensor, expected: Tensor) -> None:
    """Equal in every bit that a comparison can see, and NaN in the same places."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def whole(x: Tensor) -> Tensor:
    """``x`` with zeros behind it, to whole blocks: what our quantizers ask for."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % 32))


def ours(x: Tensor, name: str = "fp4", mode: str = "even") -> Tensor:
    """``x`` as our own quantizer fake-quantizes it."""
    return quantizer(name, mode).fake_quantize(whole(x))[..., : x.shape[-1]]


def stored(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Bytes and scales of ``x``, as our own quantizer packs them."""
    own = quantizer(name)
    qparams = own.find_qparams(whole(x))
    packed = own.pack(own.quantize(whole(x), qparams), qparams)
    return packed[""][..., : x.shape[-1] * BITS[name] // 8], packed["scale"]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_qdq_mxfp4_is_our_own_quantizer(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = numbers(shape, dtype)
    before = x.clone()
    same(mx.qdq_mxfp4(x), ours(x))
    assert torch.equal(x, before), "the argument is left alone"


@pytest.mark.parametrize("mode", ["even", "floor", "ceil", "rceil"])
def test_qdq_mxfp4_knows_every_way_to_choose_a_scale(mode: str) -> None:
    x = numbers((8, 64))
    same(mx.qdq_mxfp4(x, mode), ours(x, mode=mode))


def test_qdq_mxfp4_refuses_an_unknown_mode() -> None:
    with pytest.raises(ConfigError, match=r"nearest.*use one of even, floor"):
        mx.qdq_mxfp4(torch.ones(32), "nearest")


def test_a_worked_block_of_mxfp4() -> None:
    x = torch.tensor([0, -0.1, 0.1, -0.2, 0.33, 0.5, -0.75, 1, 1.25, -1.5, 1.75, 2.5] + [0] * 19 + [7])
    assert mx.qdq_mxfp4(x)[:12].tolist() == [0, 0, 0, 0, 0, 0, -1, 1, 1, -2, 2, 2]


def test_values_that_are_no_numbers_stay_visible() -> None:
    x = torch.ones(2, 64)
    x[0, 3] = torch.nan
    found = mx.qdq_mxfp4(x)
    assert found[0, :32].isnan().all()
    assert (found[0, 32:] == 1).all()
    assert (found[1] == 1).all()


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dq_mxfp4_reads_what_our_quantizer_packs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = numbers(shape)
    data, scale = stored(x, "fp4")
    found = mx.dq_mxfp4(data, scale, dtype)
    same(found, ours(x).to(dtype))
    assert found.is_contiguous()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dq_mxfp4_is_exact_for_every_code_and_every_scale(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).expand(256, 256)
    scale = torch.arange(256, dtype=torch.uint8).unsqueeze(1).expand(256, 16)
    grid = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = torch.tensor([[sign * g for sign in (1, -1) for g in grid]], dtype=torch.float64)
    pairs = torch.stack((codes & 15, codes >> 4), -1).reshape(256, 512).long()
    exact = values[0][pairs] * torch.exp2(torch.arange(256, dtype=torch.float64) - 127).unsqueeze(1)
    exact[255] = torch.nan
    same(mx.dq_mxfp4(codes, scale, dtype), exact.float().to(dtype))
    same(mx.dq_mxfp4(codes, scale.contiguous().view(torch.float8_e8m0fnu), dtype), exact.float().to(dtype))


def test_dq_mxfp4_says_which_scales_it_needs() -> None:
    with pytest.raises(ConfigError, match=r"\(4, 32\) need scales \(4, 2\), not \(4, 3\)"):
        mx.dq_mxfp4(torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 3, dtype=torch.uint8), torch.bfloat16)


EXAMPLES = [
    ("fp4", {0: 2**-127, 1: 0.25, 1.75: 0.5, 2: 0.5, 3.4: 0.5, 3.5: 1, 5: 1, 7: 2, 8: 2, 448: 128, math.inf: 2**127}),
    ("fp6_e2m3", {0: 2**-127, 1.875: 0.25, 1.9375: 0.5, 7: 1, 7.75: 2, math.inf: 2**127}),
    ("fp6_e3m2", {0: 2**-127, 1.75: 0.0625, 1.875: 0.125, 7: 0.25, 28: 1, 30: 2}),
    ("fp8_e4m3", {448: 1, 1: 2**-8, 1.875: 2**-8, 1.9375: 2**-7}),
    ("fp8_e5m2", {1: 2**-15, 1.75: 2**-15, 1.875: 2**-14}),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("name", "examples"), EXAMPLES)
def test_even_round_by_worked_examples(name: str, examples: dict[float, float], dtype: torch.dtype) -> None:
    found = even_round(torch.tensor([*examples, math.nan], dtype=dtype), name)
    assert found.dtype is torch.float32
    assert found[:-1].tolist() == list(examples.values())
    assert found[-1].isnan()
    same(even_round(torch.ones(2, 3), Dtype(name)), even_round(torch.ones(2, 3), name))


@pytest.mark.parametrize(("shape", "axis"), AXES)
def test_blocks_are_cut_along_the_axis_and_filled_with_zeros(shape: tuple[int, ...], axis: int) -> None:
    x = numbers(shape)
    blocks = reshape_to_blocks(x, 32, axis)
    length = shape[axis]
    assert blocks.shape == (x.numel() // length, -(-length // 32), 32)
    flat = blocks.flatten(1)
    assert not flat[:, length:].any()
    swapped = x.transpose(axis, -1)
    assert torch.equal(flat[:, :length].reshape(swapped.shape), swapped)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fake_quantization_with_even_scales_is_our_own_quantizer(shape: tuple[int, ...], name: str, dtype: torch.dtype) -> None:
    x = numbers(shape, dtype)
    before = x.clone()
    scale = even_round(reshape_to_blocks(x, 32, -1).abs().amax(-1), name)
    found = fake_quantize_fp4_fp6_per_group_with_scale(x, scale, axis=-1, group_size=32, quant_dtype=name)
    same(found, ours(x, name))
    assert torch.equal(x, before), "the argument is left alone"


@pytest.mark.parametrize(("shape", "axis"), AXES)
def test_fake_quantization_along_any_axis(shape: tuple[int, ...], axis: int) -> None:
    x = numbers(shape)
    scale = even_round(reshape_to_blocks(x, 32, axis).abs().amax(-1, keepdim=True), "fp6_e2m3")
    found = fake_quantize_fp4_fp6_per_group_with_scale(x, scale, axis, 32, "fp6_e2m3")
    same(found, ours(x.transpose(axis, -1), "fp6_e2m3").transpose(axis, -1))


def test_any_scale_serves_and_one_of_zero_is_a_small_one() -> None:
    scale = torch.tensor([[0.75], [0.0]])
    found = fake_quantize_fp4_fp6_per_group_with_scale(torch.full((2, 32), 1.9), scale, -1, 32, "fp6_e2m3")
    assert found[0].tolist() == [2.5 * 0.75] * 32, "1.9 / 0.75 lies between 2.5 and 2.75"
    assert found[1].tolist() == [7.5 * 2**-23] * 32


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("shape", [(64,), (5, 96), (2, 3, 64)], ids=str)
def test_unpacking_and_scaling_reads_what_our_quantizer_packs(shape: tuple[int, ...], name: str) -> None:
    x = numbers(shape)
    data, scale = stored(x, name)
    method = create_pack_method(None, dtype=name)
    values = method.unpack(data, reorder=False)
    assert values.dtype is torch.float32
    assert torch.equal(method.pack(values, reorder=False), data)
    multiplier = torch.exp2(scale.float() - 127)
    found = dequantize_fp4_fp6_per_group(values, multiplier, axis=-1, group_size=32, quant_dtype=name)
    same(found, ours(x, name))


def test_every_packed_byte_comes_back() -> None:
    for name in SPECS:
        data = torch.randint(0, 256, (4, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        method = create_pack_method("per_group", name)
        assert torch.equal(method.pack(method.unpack(data)), data)
    assert create_pack_method(None, "fp4").unpack(torch.tensor([0xA1, 0x87], dtype=torch.uint8)).tolist() == [0.5, -1.0, 6.0, -0.0]
    with pytest.raises(UnsupportedError, match="create_pack_method does not know the format 'int4': use one of fp4, fp6_e2m3, fp6_e3m2"):
        create_pack_method(None, "int4")


@pytest.mark.parametrize(("shape", "axis"), AXES)
def test_scales_are_applied_along_any_axis(shape: tuple[int, ...], axis: int) -> None:
    x = numbers(shape)
    counts = list(shape)
    counts[axis] = -(-shape[axis] // 32)
    scale = torch.arange(1.0, 1 + math.prod(counts)).reshape(counts)
    expected = x * scale.repeat_interleave(32, axis).narrow(axis, 0, shape[axis])
    same(dequantize_fp4_fp6_per_group(x, scale, axis=axis, group_size=32), expected)
    with_block_axis = scale.unsqueeze(axis % len(shape) + 1)
    same(dequantize_fp4_fp6_per_group(x, with_block_axis, axis=axis, group_size=32), expected)


def test_too_few_scales_are_an_error_that_names_both() -> None:
    with pytest.raises(ConfigError, match=r"dequantize_fp4_fp6_per_group: 3 rows of 2 blocks .* \(3, 1\)"):
        dequantize_fp4_fp6_per_group(torch.ones(3, 64), torch.ones(3, 1), -1, 32)


def even_fake_quantize(x: Tensor) -> Tensor:
    scale = even_round(reshape_to_blocks(x, 32, -1).abs().amax(-1), "fp6_e3m2")
    return fake_quantize_fp4_fp6_per_group_with_scale(x, scale, axis=-1, group_size=32, quant_dtype="fp6_e3m2")


def unpack_six(x: Tensor) -> Tensor:
    values = create_pack_method(None, dtype="fp6_e3m2").unpack(x.view(torch.uint8), reorder=False)
    return dequantize_fp4_fp6_per_group(values, torch.ones(*values.shape[:-1], values.shape[-1] // 32), axis=-1, group_size=32)


def from_bytes(x: Tensor) -> Tensor:
    data = x.view(torch.uint8)
    return mx.dq_mxfp4(data, data[..., : data.shape[-1] // 16], torch.bfloat16)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("function", "backend"), [(mx.qdq_mxfp4, "eager"), (even_fake_quantize, "eager"), (unpack_six, "eager"), (from_bytes, "aot_eager")]
)
def test_torch_compile_traces_each_function_whole(function: Callable[[Tensor], Tensor], backend: str) -> None:
    """One of them by the backend that also traces operators on the meta device.

    It takes seconds.
    """
    if function is unpack_six and torch.__version__.startswith("2.10."):
        pytest.skip("dynamo of torch 2.10 hashes no frozen class of attrs")
    x = numbers((6, 96))
    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=True)
    same(compiled(x), function(x))
    same(compiled(x[1:3]), function(x[1:3]))


def test_nothing_is_read_back_from_the_device() -> None:
    x = torch.empty(4, 96, device="meta")
    assert mx.qdq_mxfp4(x).shape == even_fake_quantize(x).shape == x.shape
    data, scale = torch.empty(4, 48, dtype=torch.uint8, device="meta"), torch.empty(4, 3, dtype=torch.uint8, device="meta")
    assert mx.dq_mxfp4(data, scale, torch.float16).shape == (4, 96)
    assert create_pack_method(None, "fp6_e3m2").unpack(data).shape == (4, 64)


def test_the_documented_modules_are_found_at_every_level() -> None:
    kernel = importlib.import_module("quark.torch.kernel")
    assert kernel.__all__ == ["hw_emulation", "mx"]
    assert kernel.hw_emulation.hw_emulation_interface.dequantize_fp4_fp6_per_group is dequantize_fp4_fp6_per_group
    assert importlib.import_module("quark.torch.quantization").utils.even_round is even_round
    assert importlib.import_module("quark.torch").utils.pack.create_pack_method is create_pack_method
    with pytest.raises(AttributeError, match=r"quark\.torch\.kernel' has no attribute 'nothing'"):
        _ = kernel.nothing


def test_importing_the_kernels_reads_neither_transformers_nor_the_pipeline() -> None:
    code = """
import sys
from quark.torch.kernel import hw_emulation, mx
mx.dq_mxfp4, hw_emulation.hw_emulation_interface.dequantize_fp4_fp6_per_group
print([name for name in sys.modules if name.startswith(("transformers", "safetensors", "quark.runs"))])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
