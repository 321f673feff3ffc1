"""Quotients by numbers are the same on every device."""

from __future__ import annotations

import torch

from quark.base.scalars import divided
from quark_devkit.simulated_device import NAME, simulated_device


def test_a_quotient_is_rounded_once_on_every_device() -> None:
    x = torch.arange(1.0, 1001.0)
    with simulated_device():
        by_reciprocal, found = (x.to(NAME) / 7.5).cpu(), divided(x.to(NAME), 7.5).cpu()
    assert torch.equal(found, x / 7.5)
    assert torch.equal(divided(x, 7.5), x / 7.5)
    assert not torch.equal(by_reciprocal, x / 7.5), "the device does not divide as CUDA does"
