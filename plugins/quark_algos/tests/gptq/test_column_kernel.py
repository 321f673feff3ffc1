"""The kernel that rounds the columns of a block, beside torch's operations.

Equal where sums are exact, and else but for ties.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import metadata

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from quark.config.enums import Dtype
from quark.config.tensor import QTensorConfig
from quark.numbers import GroupScales
from quark_algos.gptq.damping import Factor, factor
from quark_algos.gptq.gptq import Swept, ldlq, ldlq_by_rows, ldlq_choosing
from tests.kit.interpreted_kernels import Kernels

from .problems import grid_for, grouped, setting

K = 32
SPECS = {
    "int4": grouped(Dtype.int4, 16),
    "uint4": grouped(Dtype.uint4, 8, symmetric=False),
    "MXFP4": QTensorConfig(dtype=Dtype.fp4, qscheme="per_group", ch_axis=-1, group_size=16, scale_format="e8m0", is_dynamic=False),
    "FP8 per channel": QTensorConfig(dtype=Dtype.fp8_e4m3, qscheme="per_channel", ch_axis=0, is_dynamic=False),
    "MX6": QTensorConfig(dtype=Dtype.mx6, qscheme="per_group", ch_axis=-1, group_size=16, is_dynamic=False),
}
Result = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def _interpreter_with_loops(kernels: Kernels) -> None:
    if kernels.device.type == "cpu" and Version(metadata.version("triton")) < Version("3.7"):
        pytest.skip("interpreters before Triton 3.7 take the bound of a loop from an array, which NumPy refuses")


def on(device: torch.device, f: Factor) -> Factor:
    return Factor(f.a.to(device), f.pivots.to(device), f.damping)


def both(kernels: Kernels, run: Callable[[torch.device], Swept]) -> tuple[Result, Result]:
    """Return Q, E and the loss of a sweep by torch's operations on the CPU, and by the kernel."""
    expected = run(torch.device("cpu"))
    with kernels.on() as device:
        found = run(device)
    return (expected.q, expected.e, expected.loss), (found.q.cpu(), found.e.cpu(), found.loss.cpu())


def exact_factor(seed: int) -> Factor:
    """A factor with few bits: sums of its products with errors of few bits are exact, in any order."""
    g = torch.Generator().manual_seed(seed)
    a = torch.eye(K) + torch.triu(torch.randint(-3, 4, (K, K), generator=g) / 8, 1)
    pivots = torch.exp2(torch.randint(-2, 3, (K,), generator=g).float())
    return Factor(a, pivots, 0.01)


def exact_scales(scales: GroupScales) -> GroupScales:
    """The scales, each as the next power of two."""
    scale = torch.exp2(scales.scale.log2().ceil())
    return GroupScales(scale, None if scales.inverse is None else 1 / scale, scales.zero, scale)


@pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("has_order", [False, True], ids=["", "ordered"])
@pytest.mark.parametrize("name", SPECS)
def test_codes_are_the_same_where_sums_are_exact(kernels: Kernels, name: str, has_order: bool, is_causal: bool) -> None:
    g = torch.Generator().manual_seed(1)
    wt = torch.randint(-64, 65, (K, 9), generator=g) / 32
    order = torch.randperm(K, generator=g) if has_order else None
    causal = None
    if is_causal:  # from the first half to the second, so that values do not gain bits again and again
        causal = torch.zeros(K, K)
        causal[: K // 2, K // 2 :] = torch.randint(-1, 2, (K // 2, K // 2), generator=g) / 4
    f = exact_factor(2)

    def run(device: torch.device) -> Swept:
        grid, scales = grid_for(SPECS[name], wt.to(device))
        each = grid.with_subscales(wt.to(device), exact_scales(scales))
        rounder = grid.rounder(each, None if order is None else order.to(device))
        return ldlq(wt.to(device), on(device, f), rounder, 20, rounder.order, None if causal is None else causal.to(device))

    for expected, found in zip(*both(kernels, run), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("name", SPECS)
def test_sums_of_another_order_change_the_last_bits_alone(kernels: Kernels, name: str) -> None:
    s = setting(3, K=K)
    f = factor(s.H.float(), 0.01)

    def run(device: torch.device) -> Swept:
        wt = s.wt.float().to(device)
        grid, scales = grid_for(SPECS[name], wt)
        return ldlq_by_rows(wt, on(device, f), grid, grid.with_subscales(wt, scales), 16)

    (q, e, loss), (found_q, found_e, found_loss) = both(kernels, run)
    # No t of this problem is as near to a tie as sums of K terms are off.
    bound = 2 * K * math.ulp(1.0) * 2**29 * float(s.W.abs().max())  # K roundings of float32 in each of both sums
    torch.testing.assert_close(found_q, q, rtol=0, atol=bound)
    torch.testing.assert_close(found_e, e, rtol=0, atol=bound)
    torch.testing.assert_close(found_loss, loss, rtol=1e-5, atol=0)


def test_scales_that_are_chosen_on_the_way_are_used(kernels: Kernels) -> None:
    s, f = setting(4, K=K), exact_factor(5)
    wt = (s.wt.float() * 64).round() / 32

    def run(device: torch.device) -> Swept:
        grid, _ = grid_for(SPECS["uint4"], wt.to(device))
        swept, scales = ldlq_choosing(wt.to(device), on(device, f), grid, lambda t, number: exact_scales(grid.scales(t)))
        assert scales.scale.shape[0] == K // 8
        return swept

    for expected, found in zip(*both(kernels, run), strict=True):
        assert torch.equal(expected, found)


def test_the_kernel_does_the_work(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    from quark_algos.gptq import column_kernel

    launched: list[int] = []
    monkeypatch.setattr(column_kernel, "round_block", lambda rounder, base, *_: launched.append(len(base)))
    s = setting(3, K=K)
    grid, scales = grid_for(SPECS["int4"], s.wt.float())
    with kernels.on() as device:
        ldlq(s.wt.float().to(device), on(device, factor(s.H.float(), 0.01)), grid.rounder(scales.map(lambda x: x.to(device))), 24)
    assert launched == [24, 8]


def test_what_no_kernel_can_round_is_rounded_by_torch(kernels: Kernels) -> None:
    s = setting(3, K=K)
    wt, f = s.wt.float(), factor(s.H.float(), 0.01)
    grid, scales = grid_for(SPECS["int4"], wt)
    rounder = grid.rounder(scales)
    expected = ldlq(wt, f, rounder)
    with kernels.on() as device:
        found = ldlq(wt.to(device), on(device, f), lambda t, k, out: out.copy_(rounder(t.cpu(), k)))
    assert torch.equal(found.q.cpu(), expected.q)
