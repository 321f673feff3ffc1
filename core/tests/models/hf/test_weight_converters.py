"""`quark.models.hf.weight_converters`: exact to the bit, and without a copy if a view suffices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.core_model_loading import MergeModulelist

from quark.config.architecture import FUSED_EXPERTS
from quark.errors import CheckpointError, ConfigError
from quark.models.hf.converted_tensors import find_conversions
from quark.models.hf.weight_converters import make_converters
from quark.torch.quantization.weight_convert import Chunk, Concatenate, ConversionOps, SplitFusedExperts, Transpose, WeightConverter

SIZES = st.integers(1, 4)
EXPERTS = make_converters(FUSED_EXPERTS)
JOINED = [
    WeightConverter(
        ["experts.*.gate_proj.weight", "experts.*.up_proj.weight"], "experts.gate_up_proj", operations=[MergeModulelist(0), Concatenate(1)]
    ),
    WeightConverter("experts.*.down_proj.weight", "experts.down_proj", operations=[MergeModulelist(0)]),
]
TRANSPOSED = [
    WeightConverter(
        "experts.gate_up_proj",
        ["experts.*.gate_proj.weight", "experts.*.up_proj.weight"],
        operations=[Transpose(1, 2), SplitFusedExperts()],
    ),
    WeightConverter("experts.gate_up_proj_bias", "experts.*.gate_up_proj.bias", operations=[SplitFusedExperts(ndim=2)]),
]


def mixture(experts: int, inner: int, hidden: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "model.layers.3.input_layernorm.weight": torch.randn(hidden),
        "model.layers.3.mlp.experts.gate_up_proj": torch.randn(experts, 2 * inner, hidden),
        "model.layers.3.mlp.experts.down_proj": torch.randn(experts, hidden, inner),
        "model.layers.3.mlp.down_proj.weight": torch.randn(hidden, inner),
    }


def converted(tensors: Mapping[str, Tensor], converters: Sequence[Any]) -> dict[str, Tensor]:
    """The tensors after converters, and the tensors that no converter matches."""
    conversions = find_conversions(tensors, converters)
    used = {name for conversion in conversions for name in conversion.sources}
    kept = {name: tensor for name, tensor in tensors.items() if name not in used}
    return kept | {name: tensor for conversion in conversions for name, tensor in conversion.make(tensors).items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@given(SIZES, SIZES, SIZES)
def test_split_and_fused_experts_are_the_same(experts: int, inner: int, hidden: int) -> None:
    tensors = mixture(experts, inner, hidden)
    parts = converted(tensors, EXPERTS)
    assert len(parts) == 2 + 3 * experts
    assert torch.equal(parts["model.layers.3.mlp.experts.0.up_proj.weight"], tensors["model.layers.3.mlp.experts.gate_up_proj"][0, inner:])
    assert same(converted(parts, JOINED), tensors)
    assert same(converted(converted(dict(reversed(parts.items())), JOINED), EXPERTS), parts)


@given(SIZES, SIZES, SIZES)
def test_operations_follow_each_other(experts: int, inner: int, hidden: int) -> None:
    fused = torch.randn(experts, hidden, 2 * inner)
    parts = converted({"mlp.experts.gate_up_proj": fused, "mlp.experts.gate_up_proj_bias": fused[:, 0].clone()}, TRANSPOSED)
    assert len(parts) == 3 * experts
    assert torch.equal(parts["mlp.experts.0.gate_proj.weight"], fused[0, :, :inner].t())
    assert torch.equal(parts["mlp.experts.0.gate_up_proj.bias"], fused[0, 0])


@given(st.lists(SIZES, min_size=2, max_size=4), st.integers(0, 1), st.randoms(use_true_random=False))
def test_chunk_and_concatenate_undo_each_other(sizes: list[int], dim: int, order: Any) -> None:
    whole = torch.randn(*((sum(sizes), 3) if dim == 0 else (3, sum(sizes))))
    targets = [f"{name}.weight" for name in "abcd"[: len(sizes)]]
    parts = converted({"x.whole.weight": whole}, [WeightConverter("whole.weight", list(targets), operations=[Chunk(dim, sizes)])])
    assert [part.shape[dim] for part in parts.values()] == sizes
    shuffled = dict(order.sample(sorted(parts.items()), len(parts)))
    joined = WeightConverter(list(targets), "whole.weight", operations=[Concatenate(dim)])
    assert torch.equal(converted(shuffled, [joined])["x.whole.weight"], whole)


def test_parts_of_equal_length_need_no_sizes() -> None:
    whole = torch.arange(6.0).view(6, 1)
    parts = converted({"whole": whole}, [WeightConverter("whole", ["a", "b", "c"], operations=[Chunk()])])
    assert same(parts, {"a": whole[:2], "b": whole[2:4], "c": whole[4:]})


def test_splitting_experts_copies_nothing() -> None:
    tensors = mixture(3, 4, 8)
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    assert {part.untyped_storage().data_ptr() for part in converted(tensors, EXPERTS).values()} == storages


def test_a_pattern_is_the_end_of_a_name_from_a_dot_on() -> None:
    converter = WeightConverter("up_proj.weight", ["a", "b"], operations=[Chunk()])
    names = {"mlp.gate_up_proj.weight", "mlp.up_proj.weight_scale"}
    assert converted(dict.fromkeys(names, torch.ones(2)), [converter]).keys() == names
    assert converted({"up_proj.weight": torch.ones(2)}, [converter]).keys() == {"a", "b"}


def test_incomplete_sources_are_refused() -> None:
    joined = WeightConverter(["q.weight", "k.weight"], "qk.weight", operations=[Concatenate()])
    with pytest.raises(CheckpointError, match=r"q\.weight, k\.weight → qk\.weight needs .* 'attn\.' has only attn\.q\.weight"):
        converted({"attn.q.weight": torch.ones(2)}, [joined])
    parts = converted(mixture(3, 4, 8), EXPERTS)
    del parts["model.layers.3.mlp.experts.1.down_proj.weight"]
    with pytest.raises(CheckpointError, match="needs all of its sources"):
        converted(parts, JOINED)


@pytest.mark.parametrize(
    ("converter", "tensor", "message"),
    [
        (WeightConverter("x", ["a", "b"], operations=[Chunk()]), torch.ones(3), "into 2 parts: give fitting sizes"),
        (WeightConverter("x", ["a", "b"], operations=[Chunk(0, (1, 1))]), torch.ones(3), "into 2 parts: give fitting sizes"),
        (WeightConverter("x", "a", operations=[Chunk()]), torch.ones(3), "into 1 parts"),
        (
            WeightConverter("x", ["a", "b"], operations=[SplitFusedExperts()]),
            torch.ones(4, 2),
            "3 axes, the first for experts, but the shape is",
        ),
        (WeightConverter("x", ["a", "b"], operations=[SplitFusedExperts()]), torch.ones(2, 3, 2), "cannot halve"),
        (WeightConverter("x", ["a", "b"], operations=[SplitFusedExperts(2)]), torch.ones(2, 2, 2), "split_axis=2 is out of range"),
        (WeightConverter("x", ["a", "b", "c"], operations=[SplitFusedExperts()]), torch.ones(2, 3, 2), "one or two matrices"),
    ],
)
def test_tensors_of_the_wrong_form_are_refused(converter: Any, tensor: Tensor, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        converted({"x": tensor}, [converter])


def test_several_tensors_for_an_operation_of_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="works on one tensor, but got 2"):
        converted({"x": torch.ones(2, 2, 2), "y": torch.ones(2)}, [WeightConverter(["x", "y"], "z", operations=[SplitFusedExperts()])])


@pytest.mark.parametrize("arguments", [(["a", "b"], ["c", "d"], [Chunk()]), ("a", ["b", "c"], [])])
def test_a_converter_without_operations_or_from_many_to_many_is_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"operation|one to many"):
        WeightConverter(*arguments[:2], operations=arguments[2])


class Doubled(ConversionOps):
    def convert(self, input_dict: Any, source_patterns: list[str], target_patterns: list[str], **_: Any) -> dict[str, Tensor]:
        return {target_patterns[0]: 2 * input_dict[source_patterns[0]]}


def test_a_custom_operation_works() -> None:
    assert converted({"x": torch.ones(1)}, [WeightConverter("x", "y", operations=[Doubled()])])["y"].item() == 2


def test_an_unknown_operation_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"no conversion operation 'Fold': use one of Chunk, Concatenate, .*SplitFusedExperts"):
        make_converters([("x", ("y",), (("Fold", 0),))])
