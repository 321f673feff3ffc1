"""`quark_exporters.fp8`: values against transformers and a float64 formula; refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quark.base.version import transformers_version
from quark.checkpoint import FloatTensor
from quark.errors import CheckpointError, ConfigError
from quark_exporters.fp8 import Fp8Dequantizer

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def found(block: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, FloatTensor]:
    stored = {name: tensor.to("meta") for name, tensor in tensors.items()}
    return {one.name: one for one in Fp8Dequantizer().float_tensors(block, stored)}


def values(block: dict[str, Any], tensors: dict[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    one = found(block, tensors)[name]
    result = one.make({source: tensors[source] for source in one.sources}, dtype)
    assert tuple(result.shape) == one.shape
    return result


LARGEST = torch.finfo(torch.float8_e4m3fn).max


def codes(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    numbers = 100 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return numbers.clamp(-LARGEST, LARGEST).to(dtype)  # what is larger becomes NaN in some releases of torch


def scales(*shape: int) -> Tensor:
    return 0.001 + 0.01 * torch.rand(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(256, 128), (128, 384), (2, 256, 128)])
def test_blocks_that_divide_are_those_of_transformers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    grid = (*shape[:-2], shape[-2] // 128, shape[-1] // 128)
    tensors = {"a.weight": codes(*shape), "a.weight_scale_inv": scales(*grid)}
    theirs = pytest.importorskip("transformers.integrations.finegrained_fp8", exc_type=ImportError)  # the oldest want Triton
    if not hasattr(theirs.Fp8Dequantize, "_dequantize_one"):
        pytest.skip(f"transformers {transformers_version()} has no function for one tensor")
    expected = theirs.Fp8Dequantize(None)._dequantize_one(tensors["a.weight"], tensors["a.weight_scale_inv"], dtype)
    assert torch.equal(values(BLOCKS, tensors, "a.weight", dtype), expected)


@pytest.mark.parametrize("shape", [(200, 300), (128, 129), (1, 1), (576, 7168 // 16)])
def test_blocks_that_do_not_divide_are_cut_off(shape: tuple[int, int]) -> None:
    tensors = {"a.weight": codes(*shape), "a.weight_scale_inv": scales(-(-shape[0] // 128), -(-shape[1] // 128))}
    row, column = np.arange(shape[0]) // 128, np.arange(shape[1]) // 128
    exact = tensors["a.weight"].float().double().numpy() * tensors["a.weight_scale_inv"].double().numpy()[row[:, None], column[None]]
    assert np.array_equal(values(BLOCKS, tensors, "a.weight", torch.float32).numpy(), exact.astype(np.float32))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(), (1,), (6,), (6, 1)])
def test_one_scale_for_the_tensor_or_for_each_row(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensors = {"a.weight": codes(6, 4, dtype=dtype), "a.weight_scale": scales(*shape), "a.input_scale": torch.ones(())}
    of_rows = tensors["a.weight_scale"].double().reshape(-1, 1)
    expected = (tensors["a.weight"].double() * of_rows).float()
    assert torch.equal(values({"quant_method": "fp8"}, tensors, "a.weight", torch.float32), expected)
    assert found({"quant_method": "fp8"}, tensors)["a.weight"].left_out == ("a.input_scale",)


@pytest.mark.parametrize(("dtype", "is_kept"), [(torch.float8_e4m3fn, True), (torch.float8_e5m2, False)])
def test_only_codes_in_e4m3_can_be_written_again_as_they_are(dtype: torch.dtype, is_kept: bool) -> None:
    tensors = {"a.weight": codes(6, 4, dtype=dtype), "a.weight_scale": scales()}
    assert bool(found({"quant_method": "fp8", "activation_scheme": "dynamic"}, tensors)["a.weight"].layers) is is_kept


def test_fused_experts_have_scales_by_the_name_of_their_tensor() -> None:
    tensors = {"mlp.experts.gate_up_proj": codes(3, 128, 256), "mlp.experts.gate_up_proj_scale_inv": scales(3, 1, 2)}
    result = values(BLOCKS, tensors, "mlp.experts.gate_up_proj", torch.float32)
    assert torch.equal(result[2, :, 128:], tensors["mlp.experts.gate_up_proj"][2, :, 128:].float() * scales(3, 1, 2)[2, 0, 1])


def test_layers_that_are_not_quantized_are_left_alone() -> None:
    assert found(BLOCKS, {"lm_head.weight": torch.ones(4, 4), "norm.weight": torch.ones(4)}) == {}


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"'a\.weight' has the shape \[256, 128\], which scales \[3, 1\] do not divide"):
        found(BLOCKS, {"a.weight": codes(256, 128), "a.weight_scale_inv": scales(3, 1)})
    with pytest.raises(CheckpointError, match=r"'a\.weight' is stored as float32 but has FP8 scales"):
        found(BLOCKS, {"a.weight": torch.ones(2, 2), "a.weight_scale_inv": scales(1, 1)})
    with pytest.raises(ConfigError, match=r"weight_block_size=\[128\]"):
        found({"weight_block_size": [128]}, {})
