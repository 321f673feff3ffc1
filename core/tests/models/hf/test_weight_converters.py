"""`quark.models.hf.weight_converters`: there and back to the bit, and without a copy where a view will do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quark.config.architecture import FUSED_EXPERTS
from quark.errors import CheckpointError, ConfigError
from quark.models.hf.weight_converters import make_converters
from quark.torch.quantization.weight_convert import (
    Chunk,
    Concatenate,
    ConversionOps,
    SplitFusedExperts,
    Transpose,
    WeightConverter,
    apply_converters,
)

SIZES = st.integers(1, 4)
EXPERTS = make_converters(FUSED_EXPERTS)
TRANSPOSED = [
    WeightConverter(
        "experts.gate_up_proj", ["experts.*.gate_proj.weight", "experts.*.up_proj.weight"], [Transpose(1, 2), SplitFusedExperts()]
    ),
    WeightConverter("experts.gate_up_proj_bias", "experts.*.gate_up_proj.bias", [SplitFusedExperts(ndim=2)]),
]


def mixture(experts: int, inner: int, hidden: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "model.layers.3.input_layernorm.weight": torch.randn(hidden),
        "model.layers.3.mlp.experts.gate_up_proj": torch.randn(experts, 2 * inner, hidden),
        "model.layers.3.mlp.experts.down_proj": torch.randn(experts, hidden, inner),
        "model.layers.3.mlp.down_proj.weight": torch.randn(hidden, inner),
    }


def revert_converters(tensors: dict[str, torch.Tensor], converters: list[WeightConverter]) -> dict[str, torch.Tensor]:
    return apply_converters(tensors, [converter.reverse_transform() for converter in converters])


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@given(SIZES, SIZES, SIZES)
def test_split_and_fused_experts_are_the_same(experts: int, inner: int, hidden: int) -> None:
    tensors = mixture(experts, inner, hidden)
    parts = apply_converters(tensors, EXPERTS)
    assert len(parts) == 2 + 3 * experts
    assert torch.equal(parts["model.layers.3.mlp.experts.0.up_proj.weight"], tensors["model.layers.3.mlp.experts.gate_up_proj"][0, inner:])
    assert same(revert_converters(parts, EXPERTS), tensors)
    assert same(apply_converters(revert_converters(parts, EXPERTS), EXPERTS), parts)


@given(SIZES, SIZES, SIZES)
def test_reverse_transform_undoes_operations_in_the_opposite_order(experts: int, inner: int, hidden: int) -> None:
    fused = torch.randn(experts, hidden, 2 * inner)
    tensors = {"mlp.experts.gate_up_proj": fused, "mlp.experts.gate_up_proj_bias": fused[:, 0].clone()}
    parts = apply_converters(tensors, TRANSPOSED)
    assert torch.equal(parts["mlp.experts.0.gate_proj.weight"], fused[0, :, :inner].t())
    assert torch.equal(parts["mlp.experts.0.gate_up_proj.bias"], fused[0, 0])
    assert same(revert_converters(parts, TRANSPOSED), tensors)


@given(st.lists(SIZES, min_size=2, max_size=4), st.integers(0, 1), st.randoms(use_true_random=False))
def test_chunk_and_concatenate_undo_each_other(sizes: list[int], dim: int, order: Any) -> None:
    whole = torch.randn(*((sum(sizes), 3) if dim == 0 else (3, sum(sizes))))
    targets = [f"{name}.weight" for name in "abcd"[: len(sizes)]]
    split = WeightConverter("whole.weight", targets, [Chunk(dim, sizes)])
    parts = apply_converters({"x.whole.weight": whole}, [split])
    assert [part.shape[dim] for part in parts.values()] == sizes
    shuffled = dict(order.sample(sorted(parts.items()), len(parts)))
    assert torch.equal(revert_converters(shuffled, [split])["x.whole.weight"], whole)
    joined = WeightConverter(targets, "whole.weight", [Concatenate(dim, sizes)])
    assert torch.equal(apply_converters(shuffled, [joined])["x.whole.weight"], whole)
    assert same(revert_converters({"x.whole.weight": whole}, [joined]), parts)


def test_splitting_experts_copies_nothing() -> None:
    tensors = mixture(3, 4, 8)
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    assert {part.untyped_storage().data_ptr() for part in apply_converters(tensors, EXPERTS).values()} == storages


def test_a_pattern_is_the_end_of_a_name_from_a_dot_on() -> None:
    converter = WeightConverter("up_proj.weight", ["a", "b"], [Chunk()])
    names = {"mlp.gate_up_proj.weight", "mlp.up_proj.weight_scale"}
    assert apply_converters(dict.fromkeys(names, torch.ones(2)), [converter]).keys() == names
    assert apply_converters({"up_proj.weight": torch.ones(2)}, [converter]).keys() == {"a", "b"}


def test_incomplete_sources_are_refused() -> None:
    joined = WeightConverter(["q.weight", "k.weight"], "qk.weight", [Concatenate()])
    with pytest.raises(CheckpointError, match=r"under 'attn\.' there are only attn\.q\.weight"):
        apply_converters({"attn.q.weight": torch.ones(2)}, [joined])
    parts = apply_converters(mixture(3, 4, 8), EXPERTS)
    del parts["model.layers.3.mlp.experts.1.down_proj.weight"]
    with pytest.raises(CheckpointError, match="needs all of its sources together"):
        revert_converters(parts, EXPERTS)


@pytest.mark.parametrize(
    ("converter", "tensor", "message"),
    [
        (WeightConverter("x", ["a", "b"], [Chunk()]), torch.ones(3), "into 2 parts: give fitting sizes"),
        (WeightConverter("x", "a", [Chunk()]), torch.ones(3), "two targets or more"),
        (WeightConverter("x", ["a", "b"], [SplitFusedExperts()]), torch.ones(4, 2), "3 axes, experts first, not one of the shape"),
        (WeightConverter("x", ["a", "b"], [SplitFusedExperts()]), torch.ones(2, 3, 2), "cannot halve"),
        (WeightConverter("x", ["a", "b"], [SplitFusedExperts(2)]), torch.ones(2, 2, 2), "split_axis is out of range"),
        (WeightConverter("x", ["a", "b", "c"], [SplitFusedExperts()]), torch.ones(2, 3, 2), "one or two matrices"),
        (WeightConverter("x", ["a", "a"], [Chunk()]), torch.ones(2), ""),
    ],
    ids=lambda value: repr(value)[:60] if isinstance(value, WeightConverter) else "",
)
def test_tensors_of_the_wrong_form_are_refused(converter: WeightConverter, tensor: torch.Tensor, message: str) -> None:
    if message:
        with pytest.raises(ConfigError, match=message):
            apply_converters({"x": tensor}, [converter])
    else:
        with pytest.raises(ConfigError, match="two tensors would get the name 'a'"):
            apply_converters({"x": tensor, "a": tensor}, [converter])


def test_concatenate_of_unequal_parts_needs_sizes() -> None:
    tensors = {"q": torch.ones(4), "k": torch.ones(2)}
    with pytest.raises(ConfigError, match=r"give sizes=\(4, 2\)"):
        apply_converters(tensors, [WeightConverter(["q", "k"], "qk", [Concatenate()])])
    converter = WeightConverter(["q", "k"], "qk", [Concatenate(sizes=(4, 2))])
    assert same(revert_converters(apply_converters(tensors, [converter]), [converter]), tensors)


@pytest.mark.parametrize("arguments", [(["a", "b"], ["c", "d"], [Chunk()]), ("a", ["b", "c"], []), ([], "b", [Chunk()])])
def test_a_converter_without_operations_or_from_many_to_many_is_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"operations|one or several"):
        WeightConverter(*arguments)


class Doubled(ConversionOps):
    def convert(self, input_dict: Any, source_patterns: list[str], target_patterns: list[str], **_: Any) -> dict[str, torch.Tensor]:
        return {target_patterns[0]: 2 * input_dict[source_patterns[0]]}


def test_a_custom_operation_works_and_has_no_reverse_unless_defined() -> None:
    converter = WeightConverter("x", "y", [Doubled()])
    assert apply_converters({"x": torch.ones(1)}, [converter])["y"].item() == 2
    with pytest.raises(NotImplementedError, match="Doubled has no reverse operation"):
        revert_converters({"y": torch.ones(1)}, [converter])


def test_equal_converters_are_equal() -> None:
    first, second = make_converters(FUSED_EXPERTS)
    assert first == WeightConverter("gate_up_proj", ["gate_proj.weight", "up_proj.weight"], operations=[SplitFusedExperts(split_axis=0)])
    assert first != second
    assert len({*EXPERTS, first, second}) == 2


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(ConfigError, match="no conversion operation 'Fold'"):
        make_converters([("x", ("y",), (("Fold", 0),))])
