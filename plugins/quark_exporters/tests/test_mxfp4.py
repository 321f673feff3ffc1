"""`quark_exporters.mxfp4`: values against transformers and a table, and checkpoints that are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quark.errors import CheckpointError
from quark_exporters.mxfp4 import Mxfp4Dequantizer

NAME = "model.layers.0.mlp.experts.gate_up_proj"


def tensors(experts: int, rows: int, groups: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), generator=generator, dtype=torch.uint8)
    return {f"{NAME}_blocks": blocks, f"{NAME}_scales": torch.randint(100, 150, (experts, rows, groups), generator=generator).byte()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_transformers(dtype: torch.dtype) -> None:
    stored = tensors(3, 10, 4)
    (one,) = Mxfp4Dequantizer().float_tensors({}, {name: t.to("meta") for name, t in stored.items()})
    assert (one.name, one.shape) == (NAME, (3, 128, 10))
    expected = convert_moe_packed_tensors(stored[f"{NAME}_blocks"], stored[f"{NAME}_scales"], dtype=dtype)
    assert torch.equal(one.make(stored, dtype), expected)


def test_every_code_has_the_value_of_the_table_low_half_first() -> None:
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    expected = np.concatenate([table, -table])
    codes = torch.arange(16, dtype=torch.uint8)
    blocks = (codes[0::2] | codes[1::2] << 4).repeat(2).view(1, 1, 1, 16)
    stored = {f"{NAME}_blocks": blocks, f"{NAME}_scales": torch.tensor([[[130]]], dtype=torch.uint8)}
    (one,) = Mxfp4Dequantizer().float_tensors({}, stored)
    assert np.array_equal(one.make(stored, torch.float32)[0, :16, 0].numpy(), 8 * expected)


@pytest.mark.parametrize("change", ["no scales", "other scales", "other blocks"])
def test_what_does_not_fit_is_refused(change: str) -> None:
    stored = tensors(2, 4, 2)
    if change == "no scales":
        del stored[f"{NAME}_scales"]
    elif change == "other scales":
        stored[f"{NAME}_scales"] = torch.zeros(2, 4, 3, dtype=torch.uint8)
    else:
        stored[f"{NAME}_blocks"] = torch.zeros(2, 4, 2, 8, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=f"'{NAME}_blocks' .* MXFP4 experts have blocks"):
        list(Mxfp4Dequantizer().float_tensors({}, stored))
