"""Roundings with one thing wrong each, and the healthy one from which they differ."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import AbsMax, Metrics, Rounding, RoundingTask, RoundToNearest
from quark.config.algorithm import AlgoConfig
from quark.models.layers import QuantizedLayer
from quark.plugins import OptionNote

from .broken_statistics import FirstBatch, ForgetsTokens, KeepsInputs, LastPart, MeanOfBatches, MeanOfTwo


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


class LeavesALock(Plain):
    def change(self, layer: QuantizedLayer) -> None:
        layer.lock = threading.Lock()  # type: ignore[assignment]


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


class ByFirstBatch(ByLargest):
    needs = (FirstBatch,)


class ByMeanOfTwo(ByLargest):
    needs = (MeanOfTwo,)


class ByMeanOfBatches(ByLargest):
    needs = (MeanOfBatches,)


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
