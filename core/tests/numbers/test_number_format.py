"""The default packing stores codes and scales as they are."""

from __future__ import annotations

import pytest
import torch

from quark.config.tensor import QTensorConfig
from quark.numbers import Packing, PerGroup, QParams

GROUPS = PerGroup(8)
SPEC = QTensorConfig(dtype="int8", qscheme="per_group", ch_axis=-1, group_size=8, is_dynamic=False)


@pytest.mark.parametrize("zero_point", [None, torch.arange(4, dtype=torch.int32).reshape(2, 2)], ids=["symmetric", "asymmetric"])
def test_codes_and_scales_are_stored_as_they_are_and_come_back(zero_point: torch.Tensor | None) -> None:
    codes, qparams = torch.arange(32, dtype=torch.int8).reshape(2, 16), QParams(torch.rand(2, 2), zero_point)
    assert Packing().pack(codes, GROUPS, "reorder") is codes
    assert Packing().unpack(codes, GROUPS, "reorder", (2, 16)) is codes
    stored = Packing().pack_qparams(qparams, SPEC, GROUPS, "reorder")
    assert stored.keys() == ({"scale"} if zero_point is None else {"scale", "zero_point"})
    again = Packing().unpack_qparams(stored, SPEC, GROUPS, "reorder", (2, 16))
    assert [tensor is again_tensor for (_, tensor), (_, again_tensor) in zip(qparams.items(), again.items(), strict=True)] == [True] * len(
        stored
    )
