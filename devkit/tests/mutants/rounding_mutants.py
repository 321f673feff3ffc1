"""Roundings with one thing wrong each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import AbsMax, Metrics, Rounding, RoundingTask, RoundToNearest
from quark.base.lazy import ObjectRef
from quark.config.algorithm import AlgoConfig
from quark.models.layers import QuantizedLayer
from quark.plugins import AlgorithmRecord, OptionNote

from .broken_settings import forgetting_all, having_an_idle_one, requiring_one, saying_nothing, taking_every_key
from .broken_statistics import ForgetsTokens, KeepsInputs, LastPart
from .mutant import Mutant

__all__ = ["HEALTHY", "MUTANTS"]


@attrs.define(kw_only=True)
class Settings(AlgoConfig):
    """Settings of the healthy rounding.

    Attributes:
        skip: It does not apply to layers with this in their name; empty for none.
    """

    name: str = "mutant_rounding"
    skip: Annotated[str, OptionNote(examples=("layer_0",))] = ""


class Plain(Rounding):
    """Round to nearest with a statistic that it does not use: the healthy rounding that mutants change."""

    needs = (AbsMax,)

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def applies_to(self, name: str) -> bool:
        return not self.settings.skip or self.settings.skip not in name

    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        task.statistic(AbsMax)
        RoundToNearest().round(task)
        for layer in task.layers.values():
            self.change(layer)
        return {name: {"layers": len(task.layers)} for name in task.layers}

    def change(self, layer: QuantizedLayer) -> None:
        """Break a rounded layer."""


class OfTheCpu(Plain):
    def change(self, layer: QuantizedLayer) -> None:
        weight = layer.weight.data
        layer.weight = nn.Parameter(weight * torch.ones(weight.shape), requires_grad=False)


def record_of(processor: Any = Plain, config: type[AlgoConfig] = Settings, **fields: Any) -> AlgorithmRecord:
    usual = {"config": ObjectRef(config), "processor": ObjectRef(processor), "capabilities": {"calibration"}}
    return AlgorithmRecord(name="mutant_rounding", kind="rounding", **(usual | fields))


def put(layer: QuantizedLayer, values: Tensor) -> None:
    layer.weight = nn.Parameter(values, requires_grad=False)


class ByRank(Plain):
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        report = super().round(task)
        for layer in task.layers.values() if task.ranks.rank else ():
            put(layer, torch.zeros_like(layer.weight))  # type: ignore[arg-type]
        return report


class NeedsText(Plain):
    needs = ("AbsMax",)  # type: ignore[assignment]

    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        return RoundToNearest().round(task)


class AnswersNone(Plain):
    def applies_to(self, name: str) -> bool:
        return None  # type: ignore[return-value]


class AppliesEverySecondTime(Plain):
    asked = 0

    def applies_to(self, name: str) -> bool:
        self.asked += 1
        return self.asked % 2 == 0


class IntegersAlone(Plain):
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        layer = next(iter(task.layers.values()))
        assert layer.weight_quantizer is not None
        if "fp" in str(layer.layer_config.weight):
            raise TypeError("only integers have a largest code")
        return super().round(task)


class LeavesNan(Plain):
    def change(self, layer: QuantizedLayer) -> None:
        values = layer.weight.detach().clone()  # type: ignore[operator]
        values[0, 0] = torch.nan
        put(layer, values)


class OffGrid(Plain):
    def change(self, layer: QuantizedLayer) -> None:
        put(layer, layer.weight * 1.0003)  # type: ignore[arg-type, operator]


class FirstLayerAlone(Plain):
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        return super().round(attrs.evolve(task, layers=dict(list(task.layers.items())[:1])))


class WrongScales(Plain):
    def change(self, layer: QuantizedLayer) -> None:
        module = layer.weight_quantizer
        assert module is not None
        assert module.qparams is not None
        module.set_qparams(attrs.evolve(module.qparams, scale=module.qparams.scale * 1.5))


class ToFloat32(Plain):
    def change(self, layer: QuantizedLayer) -> None:
        put(layer, layer.weight.float())  # type: ignore[arg-type, operator]


class Transposed(Plain):
    def change(self, layer: QuantizedLayer) -> None:
        put(layer, layer.weight.t())  # type: ignore[arg-type, operator]


class InPlace(Plain):
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        shared: list[Any] = [layer.weight for layer in task.layers.values()]
        report = super().round(task)
        for layer, weight in zip(task.layers.values(), shared, strict=True):
            weight.data.copy_(layer.weight)
            layer.weight = weight
        return report


class CorrectsBias(Plain):
    def change(self, layer: QuantizedLayer) -> None:
        layer.bias = nn.Parameter(layer.bias + 0.01, requires_grad=False)  # type: ignore[operator]


class LeavesAHook(Plain):
    def change(self, layer: QuantizedLayer) -> None:
        layer.register_forward_pre_hook(lambda *_: None)


class AddsABuffer(Plain):
    def change(self, layer: QuantizedLayer) -> None:
        layer.register_buffer("factors", torch.ones(3))


class ReportsTensors(Plain):
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        super().round(task)
        return {name: {"loss": torch.ones(())} for name in task.layers}  # type: ignore[dict-item]


class ReportsOtherLayers(Plain):
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        super().round(task)
        return {"lm_head": {"loss": 1.0}}


class Undeclared(Plain):
    needs = ()


class AtRandom(Plain):
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        for layer in task.layers.values():
            put(layer, layer.weight + 0.01 * torch.rand_like(layer.weight))  # type: ignore[arg-type, operator]
        return super().round(task)


class Remembers(Plain):
    used = 0

    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        self.used += 1
        for layer in task.layers.values():
            put(layer, layer.weight * (1 + 0.1 * self.used))  # type: ignore[arg-type, operator]
        return super().round(task)


class ByLargest(Plain):
    """Scales by a statistic, so that an error of it shows."""

    needs = (LastPart,)

    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        largest = next(iter(task.statistics.values())).largest  # type: ignore[attr-defined]
        for layer in task.layers.values():
            put(layer, layer.weight * (1 + largest.sum()))  # type: ignore[arg-type, operator]
        RoundToNearest().round(task)
        return {}


class ByForgetful(ByLargest):
    needs = (ForgetsTokens,)


class ByKept(ByLargest):
    needs = (KeepsInputs,)


class Halves(Plain):
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        for layer in task.layers.values():
            put(layer, layer.weight * 0.5)  # type: ignore[arg-type, operator]
        return super().round(task)


class DividesByTokens(Plain):
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        tokens = task.statistic(AbsMax).tokens
        report = super().round(task)
        for layer in task.layers.values():
            put(layer, layer.weight * ((tokens - 1) / (tokens - 1 if tokens > 1 else 0 * layer.weight)))  # type: ignore[arg-type, operator]
        return report


class DividesByInputs(Plain):
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        largest = task.statistic(AbsMax).value  # type: ignore[attr-defined]
        report = super().round(task)
        for layer in task.layers.values():
            put(layer, layer.weight * (largest / largest))  # type: ignore[arg-type, operator]
        return report


class DividesByWeights(Plain):
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        sizes = [layer.weight.abs().max() for layer in task.layers.values()]  # type: ignore[operator]
        report = super().round(task)
        for layer, size in zip(task.layers.values(), sizes, strict=True):
            put(layer, layer.weight * (size / size))  # type: ignore[arg-type, operator]
        return report


class FirstBlockAlone(Plain):
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        if any("layers.1" in name for name in task.layers):
            raise IndexError("there is one block")
        return super().round(task)


class WithTail(Plain):
    """Applies to names that end in ``proj``, when it is made first."""

    made = 0

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        type(self).made += 1
        self.number = type(self).made

    def applies_to(self, name: str) -> bool:
        return self.number % 2 == 0 or "q_proj" not in name


class ScalesOutputs(Plain):
    def change(self, layer: QuantizedLayer) -> None:
        layer.register_forward_hook(lambda module, args, output: output * 1.25)


class CountsBlocks(Plain):
    """Rounds by how often it was called in this process."""

    calls = 0

    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        type(self).calls += 1
        for layer in task.layers.values():
            put(layer, layer.weight * (1 + 1e-3 * self.calls))  # type: ignore[arg-type, operator]
        return super().round(task)


class RemembersBlocks(Plain):
    """Rounds by how many blocks this object has seen, which a resumed run does not know."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.seen = 0

    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        self.seen += 1
        for layer in task.layers.values():
            put(layer, layer.weight * (1 + 1e-2 * self.seen))  # type: ignore[arg-type, operator]
        return super().round(task)


class RemembersLayers(Plain):
    """Rounds by how many layers its class knows, which is lost with the process."""

    known: ClassVar[dict[str, int]] = {}

    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        for name, layer in task.layers.items():
            count = self.known.setdefault(name, len(self.known))
            put(layer, layer.weight * (1 + 1e-2 * count))  # type: ignore[arg-type, operator]
        return super().round(task)


class CountsTasks(Plain):
    """Rounds otherwise from the thirtieth task on."""

    calls = 0

    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        type(self).calls += 1
        for layer in task.layers.values() if self.calls > 30 else ():
            put(layer, layer.weight * 1.1)  # type: ignore[arg-type, operator]
        return super().round(task)


class Seeds(Plain):
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        torch.manual_seed(7)
        return super().round(task)


HEALTHY = (record_of(),)


def _mutant(check: str, about: str, processor: Any = Plain, config: type[AlgoConfig] = Settings, **fields: Any) -> Mutant:
    return Mutant(f"rounding:{check}", about, (record_of(processor, config, **fields),))


MUTANTS = (
    _mutant("is_made_of_its_settings", "needs a text", NeedsText),
    _mutant("default_settings_are_valid", "has settings that cannot be made without arguments", config=requiring_one(Settings)),
    _mutant("settings_survive_json", "forgets its settings in JSON", config=forgetting_all(Settings)),
    _mutant("refuses_unknown_settings", "takes every key", config=taking_every_key(Settings)),
    _mutant("describes_its_settings", "says nothing of its options", config=saying_nothing(Settings)),
    _mutant("heeds_its_options", "does nothing with one option", config=having_an_idle_one(Settings)),
    _mutant("declares_calibration", "measures inputs and does not say so", capabilities=()),
    _mutant("says_to_which_layers_it_applies", "answers None", AnswersNone),
    _mutant("says_to_which_layers_it_applies", "applies every second time", AppliesEverySecondTime),
    _mutant("rounds_every_scheme", "rounds integers alone", IntegersAlone),
    _mutant("excludes_schemes_that_there_are", "excludes a misspelt scheme", excluded_schemes={"int4_wo32": "its groups are small"}),
    _mutant("leaves_finite_weights_on_the_grid", "leaves NaN", LeavesNan),
    _mutant("leaves_finite_weights_on_the_grid", "leaves values off the grid", OffGrid),
    _mutant("leaves_finite_weights_on_the_grid", "rounds the first layer alone", FirstLayerAlone),
    _mutant("leaves_finite_weights_on_the_grid", "sets other scales than it rounds by", WrongScales),
    _mutant("keeps_shapes_and_dtypes", "turns weights into float32", ToFloat32),
    _mutant("keeps_shapes_and_dtypes", "transposes weights", Transposed),
    _mutant("leaves_the_float_parameter_alone", "writes to the float parameter", InPlace),
    _mutant("changes_nothing_but_weights", "corrects biases", CorrectsBias),
    _mutant("changes_nothing_but_weights", "leaves a hook", LeavesAHook),
    _mutant("changes_nothing_but_weights", "adds a buffer", AddsABuffer),
    _mutant("reports_json_values", "reports tensors", ReportsTensors),
    _mutant("reports_json_values", "reports another layer", ReportsOtherLayers),
    _mutant("uses_declared_statistics_alone", "uses a statistic that it does not declare", Undeclared),
    _mutant("is_deterministic", "adds noise", AtRandom),
    _mutant("is_deterministic", "remembers how often it was used", Remembers),
    _mutant("is_deterministic", "rounds otherwise after many tasks", CountsTasks),
    _mutant("is_deterministic", "seeds the generator of everybody", Seeds),
    _mutant("merged_statistics_give_the_same", "forgets what was merged", ByLargest),
    _mutant("merged_statistics_give_the_same", "does not count merged tokens", ByForgetful),
    _mutant("statistics_leave_inputs_alone", "keeps its inputs", ByKept),
    _mutant("is_no_worse_than_round_to_nearest", "halves weights", Halves),
    _mutant("survives_few_tokens", "divides by the number of tokens less one", DividesByTokens),
    _mutant("survives_dead_channels", "divides by the size of inputs", DividesByInputs),
    _mutant("survives_odd_layers", "divides by the size of weights", DividesByWeights),
    _mutant("quantizes_a_model", "knows one block", FirstBlockAlone),
    _mutant("leaves_other_layers_to_round_to_nearest", "applies to other layers each time that it is made", WithTail),
    _mutant("works_on_an_accelerator", "multiplies by a tensor that it makes on the CPU", OfTheCpu),
    _mutant("reloads_to_the_same_logits", "leaves a hook that no checkpoint holds", ScalesOutputs),
    _mutant("is_the_same_on_two_ranks", "rounds to zero on all ranks but the first", ByRank),
    _mutant("resumes_to_the_same_bytes", "rounds by how many blocks it has seen", RemembersBlocks),
    _mutant("resumes_to_the_same_bytes", "keeps on its class which layers it has seen", RemembersLayers),
    _mutant("streams_to_the_same_bytes", "rounds by how often it was called", CountsBlocks),
)
