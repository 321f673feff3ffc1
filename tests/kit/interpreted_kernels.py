"""Run Triton kernels in tests: compiled on a GPU, or in Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from quark.numbers.kernels import VARIABLE


@attrs.frozen
class Kernels:
    """Enables kernels on a device, and returns the bits of tensors."""

    device: torch.device
    monkeypatch: pytest.MonkeyPatch

    @contextmanager
    def on(self) -> Iterator[torch.device]:
        """Enable kernels for tensors on ``device``, and yield the device; tensors on other devices use torch's operations."""
        with self.monkeypatch.context() as patch:
            patch.setenv(VARIABLE, self.device.type)
            yield self.device


def kernels_or_skip(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Yield the kernels; skip the test if there is neither a GPU nor the interpreter.

    Warnings of numpy, which the interpreter uses, are off.
    """
    pytest.importorskip("triton", reason="Triton is not installed: make kernels")
    import numpy as np

    monkeypatch.setenv(VARIABLE, "")
    if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        yield Kernels(torch.device("cuda"), monkeypatch)
        return
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is no GPU, and TRITON_INTERPRET=1 is not set, as make kernels does")
    _round_casts_to_bfloat16(monkeypatch)
    with np.errstate(all="ignore"):
        yield Kernels(torch.device("cpu"), monkeypatch)


def _round_casts_to_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter round casts from float32 to bfloat16, as GPUs do (``cvt.rn.bf16x2.f32``), instead of truncating."""
    import numpy as np
    import triton.language as tl

    interpreter = sys.modules["triton.runtime.interpreter"]
    convert = interpreter._convert_float

    def converted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16):
            return torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        if (source, target) == (tl.bfloat16, tl.float32):
            return torch.from_numpy(np.ascontiguousarray(data).view(np.int16)).view(torch.bfloat16).float().numpy()
        return convert(data, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", converted)


def bits(x: Tensor) -> Tensor:
    """Return the bits of a tensor as integers on the CPU; all NaN have the same bits."""
    x = x.cpu()
    if x.is_floating_point() and x.dtype.itemsize > 1:
        x = torch.where(x.isnan(), torch.nan, x)
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


def assert_same_bits(found: Tensor | None, expected: Tensor | None) -> None:
    """Assert that two tensors agree in shape, dtype and bits, except in the payload of NaN."""
    if expected is None or found is None:
        assert found is expected
        return
    assert found.dtype is expected.dtype
    assert found.shape == expected.shape
    torch.testing.assert_close(bits(found), bits(expected), rtol=0, atol=0)
