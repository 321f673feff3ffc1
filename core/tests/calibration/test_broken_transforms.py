"""Broken transforms: each ends the run with an error that names plugin, version, algorithm and block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import quark_tiny_model as tiny
from quark.algorithms import AbsMax, BlockContext, Transform
from quark.errors import PluginError

Quantized = Callable[..., nn.Module]
KIND = "transform"
FIRST = "model.layers.0"
WHO = "of broken-quant 0.3"


class Sound(Transform):
    """A correct transform, which changes nothing; subclasses break it."""

    def apply(self, block: BlockContext) -> Any:
        self.spoil(block.module)
        return {block.name: {"done": True}}

    def spoil(self, block: Any) -> None:
        """Nothing."""


def makes_nan(block: Any) -> None:
    block.mlp.up_proj.weight.data[0, 0] = torch.nan


def makes_inf_in_a_norm(block: Any) -> None:
    block.input_layernorm.weight = nn.Parameter(block.input_layernorm.weight.data / 0.0, requires_grad=False)


def changes_shape(block: Any) -> None:
    block.mlp.up_proj.weight = nn.Parameter(block.mlp.up_proj.weight.data[:8], requires_grad=False)


def changes_dtype(block: Any) -> None:
    block.mlp.up_proj.weight = nn.Parameter(block.mlp.up_proj.weight.data.half(), requires_grad=False)


def adds_bias(block: Any) -> None:
    block.mlp.up_proj.bias = nn.Parameter(torch.zeros(block.mlp.up_proj.out_features), requires_grad=False)


def deletes_a_layer(block: Any) -> None:
    del block.mlp.up_proj


def boom(block: Any) -> None:
    raise RuntimeError("boom")


BLOCKS = {
    makes_nan: "in which 'mlp.up_proj.weight' holds NaN or Inf",
    makes_inf_in_a_norm: "in which 'input_layernorm.weight' holds NaN or Inf",
    changes_shape: r"in which 'mlp.up_proj.weight' is torch.float32\[8, 256\], but was torch.float32\[384, 256\] before",
    changes_dtype: "in which 'mlp.up_proj.weight' is torch.float16",
    adds_bias: "has added or removed 'mlp.up_proj.bias' in 'model.layers.0', but a transform with works_by_block = True must not",
    deletes_a_layer: "has added or removed 'mlp.up_proj.weight' in 'model.layers.0', but a transform with works_by_block = True must not",
    boom: "raised RuntimeError: boom",
}


def transforming(spoil: Callable[[Any], None]) -> Callable[[], Any]:
    return type("Spoiling", (Sound,), {"spoil": lambda self, block: spoil(block)})


@pytest.mark.parametrize("spoil", BLOCKS, ids=lambda f: f.__name__)
def test_a_transform_that_spoils_a_block_is_named_with_the_block(quantized: Quantized, spoil: Callable[[Any], None]) -> None:
    with pytest.raises(PluginError, match=BLOCKS[spoil]) as caught:
        quantized(transforming(spoil))
    assert str(caught.value).startswith(f"the algorithm 'breaking' {WHO}")
    assert f"'{FIRST}'" in str(caught.value)


class SaysNotApplied(Sound):
    """Reports that it has changed no block."""

    def apply(self, block: BlockContext) -> Any:
        super().apply(block)
        return {block.name: {"applied": False}}


def scales_a_layer(block: Any) -> None:
    block.mlp.up_proj.weight.data.mul_(2)


def exchanges_a_parameter(block: Any) -> None:
    block.mlp.up_proj.weight = nn.Parameter(block.mlp.up_proj.weight + 1, requires_grad=False)


def takes_it_back_by_half(block: Any) -> None:
    before = block.mlp.up_proj.weight.clone()
    block.mlp.up_proj.weight.data.mul_(2)
    block.input_layernorm.weight.data.div_(2)
    block.mlp.up_proj.weight.data.copy_(before)


def takes_it_back(block: Any) -> None:
    takes_it_back_by_half(block)
    block.input_layernorm.weight.data.mul_(2)


@pytest.mark.parametrize(
    ("spoil", "tensor"),
    [
        (scales_a_layer, "mlp.up_proj.weight"),
        (exchanges_a_parameter, "mlp.up_proj.weight"),
        (takes_it_back_by_half, "input_layernorm.weight"),
    ],
)
def test_a_change_that_is_denied_is_named_with_block_and_tensor(quantized: Quantized, spoil: Callable[[Any], None], tensor: str) -> None:
    with pytest.raises(PluginError) as caught:
        quantized(type("Denying", (SaysNotApplied,), {"spoil": lambda self, block: spoil(block)}))
    told = f"the algorithm 'breaking' {WHO} reports \"applied\": False for '{FIRST}', but has changed {tensor}. "
    assert str(caught.value).startswith(told)


def test_a_change_that_is_denied_before_it_is_made_is_found_too(quantized: Quantized) -> None:
    class Late(SaysNotApplied):
        def finish(self, block: BlockContext) -> Any:
            scales_a_layer(block.module)
            return {}

    with pytest.raises(PluginError, match=f"reports .applied.: False for '{FIRST}', but has changed mlp.up_proj.weight"):
        quantized(Late)


def test_what_was_taken_back_altogether_is_no_change(quantized: Quantized) -> None:
    model = quantized(type("TakesBack", (SaysNotApplied,), {"spoil": lambda self, block: takes_it_back(block)}))
    assert model.quant_config.algo_config is None


def test_a_transform_that_has_changed_something_outside_the_blocks_alone_is_named_in_the_result(quantized: Quantized) -> None:
    class Outside(SaysNotApplied):
        def apply_global(self, model: Any) -> None:
            model.lm_head.weight.data.mul_(2)

    assert [a.name for a in quantized(Outside).quant_config.algo_config] == ["breaking"]  # type: ignore[union-attr]


def test_a_tensor_that_what_runs_with_the_model_adds_to_a_block_is_refused(
    quantized: Quantized,
) -> None:
    with pytest.raises(PluginError, match=r"has added or removed 'mlp\.up_proj\.bias' in 'model\.layers\.0', but a transform with"):
        quantized(transforming(adds_bias), runs=True)


def test_a_statistic_that_is_not_declared_is_refused_by_name(quantized: Quantized) -> None:
    class Asks(Sound):
        def apply(self, block: BlockContext) -> Any:
            block.statistic("mlp.up_proj", AbsMax)
            return {}

    with pytest.raises(PluginError, match="asked for the statistic AbsMax, which it does not declare: its needs are none"):
        quantized(Asks)


def test_a_transform_that_reports_nothing_sensible_is_named(quantized: Quantized) -> None:
    class Silent(Sound):
        def apply(self, block: BlockContext) -> Any:
            return None

    with pytest.raises(PluginError, match="reports None instead of a mapping"):
        quantized(Silent)


def test_an_object_of_another_class_is_refused_before_any_work(quantized: Quantized) -> None:
    with pytest.raises(PluginError, match=r"makes a NoTransform, whose class does not derive from quark\.algorithms\.Transform"):
        quantized(type("NoTransform", (), dict(vars(Sound))))


def test_a_run_of_another_class_is_refused_before_anything_is_changed(quantized: Quantized) -> None:
    class Starts(Sound):
        def start(self, model: nn.Module, plan: object) -> Any:
            return object()

    model = tiny.tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(PluginError, match=f"'breaking' {WHO} starts a object, whose class does not derive from .*TransformRun"):
        quantized(Starts, model=model)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


def test_a_transform_that_says_nothing_of_its_work_leaves_every_block_as_it_was(quantized: Quantized) -> None:
    model = quantized(type("Idle", (Transform,), {}))
    assert model.quant_config.algo_config is None
