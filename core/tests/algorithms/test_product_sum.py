"""ProductSum computes products in the right precision, and restores the process's precision setting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quark.algorithms import CrossMoment, Hessian, OutputMoment, Statistic, product_sum


@pytest.fixture
def precision() -> Iterator[Any]:
    """The precision of torch's matrix products on CPUs, ``ieee`` while a test runs."""
    matmul = torch.backends.mkldnn.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "ieee"
    yield matmul
    matmul.fp32_precision = before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [Hessian, CrossMoment, OutputMoment])
def test_products_are_those_of_bfloat16_where_both_inputs_are(
    kind: type[Statistic], dtype: torch.dtype, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cross moment, the difference of two inputs is not bfloat16. An error restores the precision."""
    allowed: list[str] = []

    def failing(*tensors: Tensor) -> None:
        allowed.append(precision.fp32_precision)
        raise RuntimeError("no memory")

    monkeypatch.setattr(product_sum, "_add_product", failing)
    statistic = kind(4, torch.device("cpu"))
    statistic.update(torch.ones(3, 4, dtype=dtype), torch.zeros(3, 4, dtype=dtype))
    with pytest.raises(RuntimeError, match="no memory"):
        statistic.flush()
    assert allowed == ["bf16" if dtype is torch.bfloat16 and kind is not CrossMoment else "ieee"]
    assert precision.fp32_precision == "ieee"
