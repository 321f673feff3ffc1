"""Broken roundings and statistics.

Each ends the run with an error that names plugin, version, algorithm and layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quark_tiny_model as tiny
from quark import algorithms
from quark.algorithms import AbsMax, Metrics, RoundingTask, RoundToNearest, Statistic
from quark.errors import ConfigError, PluginError

Quantized = Callable[..., nn.Module]
KIND = "rounding"
FIRST = "model.layers.0"
WHO = "of broken-quant 0.3"


class Rounding(RoundToNearest):
    """A correct rounding; subclasses break it."""

    needs = (AbsMax,)

    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        super().round(task)
        for layer in task.layers.values():
            self.spoil(layer)
        return {name: {"share": 1.0} for name in task.layers}

    def spoil(self, layer: Any) -> None:
        """Nothing."""


def leaves_nan(layer: Any) -> None:
    layer.weight.data[0, 0] = torch.nan


def leaves_inf(layer: Any) -> None:
    layer.weight.data[-1, -1] = torch.inf


def off_grid(layer: Any) -> None:
    layer.weight.data[3, 5] += layer.weight_quantizer.scale[3, 0] / 3


def float_weights(layer: Any) -> None:
    layer.weight = nn.Parameter(torch.randn_like(layer.weight), requires_grad=False)


def wrong_scales(layer: Any) -> None:
    layer.weight_quantizer.scale = layer.weight_quantizer.scale * 1.5


def nan_scales(layer: Any) -> None:
    layer.weight_quantizer.scale[0] = torch.nan


def negative_scales(layer: Any) -> None:
    layer.weight_quantizer.scale = -layer.weight_quantizer.scale
    layer.weight = nn.Parameter(-layer.weight.data, requires_grad=False)


def scales_of_another_shape(layer: Any) -> None:
    layer.weight_quantizer.scale = layer.weight_quantizer.scale[:, :1].clone()


def no_qparams(layer: Any) -> None:
    layer.weight_quantizer.scale = None


def wrong_shape(layer: Any) -> None:
    layer.weight = nn.Parameter(layer.weight.data[:, :32].clone(), requires_grad=False)


def wrong_dtype(layer: Any) -> None:
    layer.weight = nn.Parameter(layer.weight.data.to(torch.float16), requires_grad=False)


def no_parameter(layer: Any) -> None:
    del layer._parameters["weight"]
    layer.weight = torch.zeros(2, 2)


def spoiling(spoil: Callable[[Any], None]) -> Callable[[], Any]:
    """Return a rounding that breaks its layers in this way."""
    return type("Spoiling", (Rounding,), {"spoil": lambda self, layer: spoil(layer)})


def answering(answer: Callable[[RoundingTask], Any]) -> Callable[[], Any]:
    """Return the class of a rounding that rounds to nearest and returns ``answer(task)`` in place of
    metrics."""

    class Answering(Rounding):
        def round(self, task: RoundingTask) -> Any:
            super().round(task)
            return answer(task)

    return Answering


class DoesNothing(Rounding):
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        return {}


class HalfTheLayers(Rounding):
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        half = dict(list(task.layers.items())[: len(task.layers) // 2])
        return super().round(RoundingTask(half, task.statistics))


class SetsValuesAgain(Rounding):
    """Rounds through the stacked weights, which set codes, and then sets other values of the same grid."""

    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        super().round(task)
        for layer in task.layers.values():
            module: Any = layer.weight_quantizer
            module.codes = module.quantizer.codes_of(layer.weight.detach(), module.qparams)
            values = torch.where(torch.arange(layer.weight.shape[1]) % 2 == 0, layer.weight.detach(), 0)
            layer.weight = nn.Parameter(values, requires_grad=False)
        return {}


class Raising(Rounding):
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        raise KeyError("boom")


class Panic(BaseException):
    """An exception like the one that a library in Rust raises for an internal error."""


class Panics(Rounding):
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        raise Panic("called `Option::unwrap()` on a `None` value")


class RaisesHalfWay(Rounding):
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        super().round(task)
        raise RuntimeError("boom")


class AsksUndeclared(Rounding):
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        task.statistic(NotAsked)
        return {}


class NotAsked(AbsMax):
    """A statistic that the rounding has not declared."""


WEIGHTS = {
    leaves_nan: "now holds NaN or Inf",
    leaves_inf: "now holds NaN or Inf",
    off_grid: "now holds values that no code represents",
    float_weights: "now holds values that no code represents",
    wrong_scales: "now holds values that no code represents",
    nan_scales: "now has a scale that is NaN, infinite, zero or negative",
    negative_scales: "now has a scale that is NaN, infinite, zero or negative",
    scales_of_another_shape: r"now has a scale of shape \[\d+, 1\] instead of \[\d+, 8\]",
    no_qparams: "now has no scales",
    wrong_shape: r"now has a weight torch.float32\[256, 32\] instead of a parameter torch.float32\[256, 256\]",
    wrong_dtype: r"now has a weight torch.float16\[256, 256\] instead of a parameter torch.float32",
    no_parameter: r"now has a weight torch.float32\[2, 2\] instead of a parameter torch.float32",
}


@pytest.mark.parametrize("spoil", WEIGHTS, ids=lambda f: f.__name__)
def test_a_rounding_that_spoils_a_layer_is_named_with_the_layer(quantized: Quantized, spoil: Callable[[Any], None]) -> None:
    with pytest.raises(PluginError, match=WEIGHTS[spoil]) as caught:
        quantized(spoiling(spoil))
    text = str(caught.value)
    assert text.startswith(f"the algorithm 'breaking' {WHO} has rounded '{FIRST}.self_attn.q_proj', which")
    assert "pip install --upgrade broken-quant" in text


def test_codes_that_a_weight_no_longer_has_are_no_error(quantized: Quantized) -> None:
    weight: Any = quantized(SetsValuesAgain).get_submodule(f"{FIRST}.mlp.up_proj").weight
    assert weight[:, ::2].any()
    assert not weight[:, 1::2].any()


@pytest.mark.parametrize(
    ("mutant", "complaint"),
    [
        (answering(lambda _: None), "reports None instead of a mapping"),
        (answering(lambda p: dict.fromkeys(p.layers, 1.0)), "reports a dict instead of a mapping from layer names"),
        (answering(lambda p: {n: {"error": torch.ones(())} for n in p.layers}), "mappings of metrics. Metrics must be JSON values"),
        (DoesNothing, "has no scales"),
        (HalfTheLayers, "has no scales"),
        (Raising, f"raised KeyError: 'boom' .*while rounding '{FIRST}.self_attn.q_proj' and 2 more"),
        (Panics, f"raised Panic: called .*while rounding '{FIRST}.self_attn.q_proj' and 2 more"),
        (RaisesHalfWay, f"raised RuntimeError: boom .*while rounding '{FIRST}.self_attn.q_proj' and 2 more"),
        (AsksUndeclared, "asked for the statistic NotAsked, which it does not declare: its needs are AbsMax"),
    ],
)
def test_a_rounding_that_answers_or_works_otherwise_than_agreed_is_named(quantized: Quantized, mutant: Any, complaint: str) -> None:
    with pytest.raises(PluginError, match=complaint) as caught:
        quantized(mutant)
    assert str(caught.value).startswith(f"the algorithm 'breaking' {WHO}")


class Bare:
    """A class that is no rounding."""


class NoRound(algorithms.Rounding):
    """A rounding without a method ``round``."""


class NeedsNone(Rounding):
    needs = None  # type: ignore[assignment]


class NeedsNothingKnown(Rounding):
    needs = (dict,)  # type: ignore[assignment]


class NoAdd(Statistic):
    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        """Nothing."""


class NeedsAbstract(Rounding):
    needs = (NoAdd,)


def fails_to_be_made() -> Any:
    raise ValueError("no luck")


@pytest.mark.parametrize(
    ("mutant", "complaint"),
    [
        (Bare, "makes a Bare, whose class does not derive from quark.algorithms.Rounding"),
        (NoRound, "raised TypeError: Can't instantiate abstract class NoRound"),
        (NeedsNone, "raised TypeError: 'NoneType' object is not iterable"),
        (NeedsNothingKnown, "needs the class dict, which is not a concrete subclass of quark.algorithms.Statistic"),
        (NeedsAbstract, "needs the class NoAdd, which is not a concrete subclass of quark.algorithms.Statistic"),
        (fails_to_be_made, "raised ValueError: no luck .*while being made of its settings"),
    ],
)
def test_what_is_no_rounding_is_refused_before_any_work(quantized: Quantized, mutant: Any, complaint: str) -> None:
    model = tiny.tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(PluginError, match=complaint) as caught:
        quantized(mutant, model=model)
    assert str(caught.value).startswith(f"the algorithm 'breaking' {WHO}")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class ChangesInputs(AbsMax):
    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        x.mul_(2)
        super().accumulate(x, reference)


class Fails(AbsMax):
    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        raise IndexError("out of luck")


@pytest.mark.parametrize(
    ("statistic", "complaint"),
    [(ChangesInputs, "the statistic ChangesInputs changes its inputs in place"), (Fails, "raised IndexError: out of luck")],
)
def test_a_statistic_that_fails_or_changes_what_it_sees_is_told_of(quantized: Quantized, statistic: Any, complaint: str) -> None:
    with pytest.raises(PluginError, match=complaint):
        quantized(type("Asking", (Rounding,), {"needs": (statistic,)}))


def test_errors_that_quark_defines_keep_their_type_and_say_whose_they_are(quantized: Quantized) -> None:
    class Refusing(Rounding):
        def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
            raise ConfigError("these settings do not fit")

    with pytest.raises(ConfigError) as caught:
        quantized(Refusing)
    assert str(caught.value) == "these settings do not fit"
    assert WHO in caught.value.__notes__[0]
    assert f"rounding '{FIRST}.self_attn.q_proj'" in caught.value.__notes__[0]


def test_an_interrupt_during_a_rounding_stays_one(quantized: Quantized) -> None:
    class Interrupted(Rounding):
        def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        quantized(Interrupted)
    assert not getattr(caught.value, "__notes__", None)


def test_what_the_machine_says_keeps_its_type(quantized: Quantized) -> None:
    class Hungry(Rounding):
        def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
            raise MemoryError

    with pytest.raises(MemoryError) as caught:
        quantized(Hungry)
    assert WHO in caught.value.__notes__[0]


def test_a_sound_rounding_passes_and_a_model_that_a_broken_one_has_left_says_so(quantized: Quantized) -> None:
    model = quantized(Rounding)
    assert set(model.quark_report.layers[f"{FIRST}.mlp.up_proj"]) >= {"share"}
    half = tiny.tiny_model()
    with pytest.raises(PluginError):
        quantized(type("Late", (Rounding,), {"spoil": late()}), model=half)
    with pytest.raises(ConfigError, match=r"quantized already: 7 layers.*Load the float model again"):
        quantized(Rounding, model=half)


def late() -> Callable[[Any, Any], None]:
    """Correct for the first block, and broken from the second on."""
    count = [0]

    def spoil(self: Any, layer: Any) -> None:
        count[0] += 1
        if count[0] > 7:
            leaves_nan(layer)

    return spoil
