"""Scales that keys and values of attention may have."""

import pytest
import torch

from quark.config.tensor import QTensorConfig
from quark.models.plan.kv_scales import is_per_head, is_per_tensor, merge_kv_scales, why_not_cached

HEADS = (2, 24)


def fp8(qscheme: str, **changes: object) -> QTensorConfig:
    fields = {"dtype": "fp8_e4m3", "qscheme": qscheme, "symmetric": True, "is_dynamic": False}
    observer = "PerTensorMinMaxObserver" if qscheme == "per_tensor" else "PerChannelMinMaxObserver"
    return QTensorConfig(**{"observer_cls": observer, **fields, **changes})  # type: ignore[arg-type]


def groups_of(size: int) -> list[QTensorConfig]:
    """Return a spec of NVFP4 with groups of that size."""
    fields = {"dtype": "fp4", "qscheme": "per_group", "ch_axis": -1, "is_dynamic": True, "symmetric": True, "scale_format": "float32"}
    first = QTensorConfig(**fields, group_size=size, observer_cls="PerBlockMXObserver")  # type: ignore[arg-type]
    return [first, fp8("per_tensor", is_scale_quant=True)]


def test_keys_and_values_may_have_a_scale_of_the_tensor_of_a_head_or_of_each_token() -> None:
    assert why_not_cached(fp8("per_tensor"), None) is None
    assert why_not_cached(fp8("per_channel", ch_axis=1), HEADS) is None
    assert why_not_cached(fp8("per_channel", ch_axis=1, is_dynamic=True), HEADS) is None
    assert why_not_cached(groups_of(8), HEADS) is None


@pytest.mark.parametrize("axis", [0, 2, -2])
def test_a_static_scale_of_a_sequence_or_a_position_is_refused(axis: int) -> None:
    reason = why_not_cached(fp8("per_channel", ch_axis=axis), HEADS)
    assert reason is not None
    assert "one per head (qscheme per_channel, ch_axis=1)" in reason


def test_groups_that_do_not_divide_a_head_are_refused() -> None:
    reason = why_not_cached(groups_of(16), HEADS)
    assert reason is not None
    assert "do not fit heads of 24 elements" in reason


def test_scales_of_heads_need_a_module_that_shows_its_heads() -> None:
    reason = why_not_cached(fp8("per_channel", ch_axis=1), None)
    assert reason is not None
    assert "does not show its heads" in reason


def test_the_words_of_a_scale() -> None:
    assert is_per_head(fp8("per_channel", ch_axis=1))
    assert not is_per_head(fp8("per_channel", ch_axis=0))
    assert is_per_tensor(fp8("per_tensor"))
    assert not is_per_tensor(groups_of(16))


def test_scales_of_heads_are_merged_head_by_head() -> None:
    merged = merge_kv_scales([torch.tensor([1.0, 4.0, 0.5]), torch.tensor([2.0, 3.0, 0.25])], 1.0)
    assert merged.tolist() == [2.0, 4.0, 1.0]
    assert merge_kv_scales([torch.tensor([2.0])], 1.0).shape == (1,), "a model with one head still has scales of heads"
