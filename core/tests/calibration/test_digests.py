"""Digests of a module's tensors find each change of a value and each exchange of channels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from quark.calibration.plugin_checks import digests_of, state_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8)


def module_with(**tensors: Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def digest(tensor: Tensor) -> bytes:
    return digests_of(module_with(x=tensor))["x"]


@settings(deadline=None)
@given(st.integers(0, 300_000), st.sampled_from(DTYPES), st.data())
def test_another_value_is_another_digest(size: int, dtype: torch.dtype, draw: st.DataObject) -> None:
    x = torch.randint(0, 100, (size,)).to(dtype)
    assert digest(x) == digest(x.clone())
    if size:
        other = x.clone()
        other[draw.draw(st.integers(0, size - 1))] += 1
        assert digest(other) != digest(x)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("distance", [1, 2, 4, 8, 64, 128, 256, 509, 512])
@pytest.mark.parametrize("shape", [(1024, 1024), (1024, 2048), (2048, 1024)])
def test_channels_that_are_exchanged_are_another_digest(shape: tuple[int, int], axis: int, distance: int) -> None:
    x = torch.randn(shape)
    order = torch.arange(shape[axis])
    order[[3, 3 + distance]] = order[[3 + distance, 3]]
    assert digest(x.index_select(axis, order)) != digest(x)


def test_channels_that_are_permuted_are_another_digest() -> None:
    x = torch.randn(256, 512)
    assert digest(x[torch.randperm(256)]) != digest(x)
    assert digest(x[:, torch.randperm(512)]) != digest(x)
    assert digest(x[:, torch.randperm(256).repeat_interleave(2) * 2 + torch.arange(512) % 2]) != digest(x)  # pairs


def test_each_tensor_has_its_own_digest_wherever_it_lies_in_memory() -> None:
    x = torch.randn(33_333)
    unaligned = torch.cat([torch.zeros(3, dtype=torch.uint8), x.view(torch.uint8)])[3:].view(torch.uint8)
    assert digest(unaligned) == digest(x.view(torch.uint8))
    assert digest(x.view(3, -1).t().contiguous().t()) == digest(x)
    several = module_with(a=torch.zeros(0), b=x, c=torch.empty(5, device="meta"), d=torch.ones(3))
    assert digests_of(several) == {"a": digest(torch.zeros(0)), "b": digest(x), "d": digest(torch.ones(3))}
    assert digests_of(several, without=("b", "a")).keys() == {"d"}


def test_a_state_tells_of_values_modules_and_hooks() -> None:
    layer = nn.Sequential(nn.Linear(3, 3))
    before = state_of(layer)
    assert state_of(layer) == before
    handle = layer[0].register_forward_hook(lambda *_: None)
    assert state_of(layer) != before
    handle.remove()
    assert state_of(layer) == before
    layer[0].weight.data.mul_(2)
    assert state_of(layer) != before
