"""Tensors that are refused for NaN or Inf, and tensors that are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quark.base.finite import buffers_of, refuse_non_finite, state_of
from quark.errors import NonFiniteError

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def check(tensors: dict[str, Tensor], buffers: tuple[str, ...] = ()) -> None:
    refuse_non_finite(tensors, buffers, lambda names: f"It is {len(names)}.")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_tensor_that_is_not_finite_is_refused_in_every_dtype(dtype: torch.dtype, value: float) -> None:
    tensors = {"a": torch.ones(3, dtype=dtype), "b": torch.ones(8, 16, dtype=dtype)}
    check(tensors)
    tensors["b"][3, 5] = value
    with pytest.raises(NonFiniteError, match=r"1 tensor\(s\): b\. It is 1\.") as error:
        check(tensors)
    assert error.value.tensor == "b"


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_tensors_whose_sum_overflows_are_not_refused(dtype: torch.dtype) -> None:
    check({"a": torch.full((8, 16), torch.finfo(dtype).max, dtype=dtype)})


def test_codes_integers_and_tensors_without_values_are_passed_over() -> None:
    codes = torch.full((2,), float("nan")).to(torch.float8_e4m3fn)
    check({"codes": codes, "integers": torch.ones(2, dtype=torch.int8), "meta": torch.ones(2, device="meta"), "none": torch.ones(0)})


def test_a_buffer_may_hold_inf_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    mask = torch.tensor([0.0, float("-inf")])
    check({"mask": mask}, ("mask",))
    assert "1 buffer(s) contain Inf" in caplog.text
    assert "mask" in caplog.text
    with pytest.raises(NonFiniteError):
        check({"mask": mask})
    with pytest.raises(NonFiniteError):
        check({"mask": torch.tensor([float("inf"), float("nan")])}, ("mask",))


def test_the_state_of_a_model_is_what_a_checkpoint_of_it_holds() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].register_buffer("table", torch.ones(1), persistent=False)
    assert state_of(model).keys() == model.state_dict().keys()
    assert buffers_of(model) == {"0.table", "1.running_mean", "1.running_var", "1.num_batches_tracked"}
