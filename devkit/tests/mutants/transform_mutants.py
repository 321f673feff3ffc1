"""Transforms with one thing wrong each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import AbsMax, BlockContext, Metrics, Transform, TransformRun
from quark.base.lazy import ObjectRef
from quark.config.algorithm import AlgoConfig
from quark.plugins import AlgorithmRecord

from . import careless_transforms
from .broken_settings import forgetting_all, having_an_idle_one, requiring_one, saying_nothing, taking_every_key
from .broken_statistics import FirstBatch
from .mutant import Mutant

__all__ = ["HEALTHY", "MOVES_VALUES", "MUTANTS"]


@attrs.define(kw_only=True)
class Settings(AlgoConfig):
    """Settings of the healthy transform.

    Attributes:
        exponent: Exponent of the power of two that is moved from norms to layers.
    """

    name: str = "mutant_transform"
    exponent: int = 1


@torch.no_grad()
def scale(module: nn.Module, by: Tensor | float) -> None:
    """Give a module another weight, multiplied by one factor for each of its input channels."""
    module.weight = nn.Parameter(module.weight * torch.as_tensor(by).to(module.weight), requires_grad=False)  # type: ignore[arg-type, operator]


class Moves(Transform):
    """Moves a power of two from each attention norm into its readers; mutants change one thing."""

    def __init__(self, settings: Settings) -> None:
        self.factor = 2.0**settings.exponent

    def apply(self, block: BlockContext) -> Mapping[str, Metrics]:
        norm = block.module.get_submodule(block.architecture.attention_norm or "")
        readers = [block.module.get_submodule(name) for name in block.architecture.attention_inputs]
        self.move(norm, readers, block)
        return {}

    def move(self, norm: nn.Module, readers: list[nn.Module], block: BlockContext) -> None:
        scale(norm, 1 / self.factor)
        for reader in readers:
            scale(reader, self.factor)


def record_of(processor: Any = Moves, config: type[AlgoConfig] = Settings, **fields: Any) -> AlgorithmRecord:
    order = {"before": ("rotation", "equalization")} | fields
    return AlgorithmRecord(name="mutant_transform", kind="transform", config=ObjectRef(config), processor=ObjectRef(processor), **order)


class NeedsText(Moves):
    needs = ("AbsMax",)  # type: ignore[assignment]


class OfTheCpu(Moves):
    def move(self, norm: nn.Module, readers: list[nn.Module], block: BlockContext) -> None:
        factors = torch.full((norm.weight.numel(),), self.factor)  # type: ignore[operator]
        for module, by in ((norm, 1 / factors), *((reader, factors) for reader in readers)):
            module.weight = nn.Parameter(module.weight * by, requires_grad=False)  # type: ignore[operator]


class DoesNothing(Moves):
    def move(self, norm: nn.Module, readers: list[nn.Module], block: BlockContext) -> None:
        pass


class ForgetsReaders(Moves):
    def move(self, norm: nn.Module, readers: list[nn.Module], block: BlockContext) -> None:
        super().move(norm, readers[:-1], block)


class QuantizedReadersAlone(Moves):
    def move(self, norm: nn.Module, readers: list[nn.Module], block: BlockContext) -> None:
        super().move(norm, [block.module.get_submodule(n) for n in block.architecture.attention_inputs if n in block.configs], block)


class HooksOutside(Moves):
    def apply_global(self, model: nn.Module) -> None:
        model.register_forward_hook(lambda *_: None)


class HooksInside(Moves):
    def move(self, norm: nn.Module, readers: list[nn.Module], block: BlockContext) -> None:
        super().move(norm, readers, block)
        norm.register_forward_hook(lambda *_: None)


class AddsABias(Moves):
    def move(self, norm: nn.Module, readers: list[nn.Module], block: BlockContext) -> None:
        super().move(norm, readers, block)
        norm.bias = nn.Parameter(torch.zeros_like(norm.weight))  # type: ignore[arg-type]


class AddsABuffer(Moves):
    def apply_global(self, model: nn.Module) -> None:
        model.register_buffer("factors", torch.ones(3))


class RemovesABuffer(Moves):
    def apply_global(self, model: nn.Module) -> None:
        owner, name = next((module, name) for module in model.modules() for name in module._buffers)
        vars(owner)[name] = owner._buffers.pop(name)


class ByFirstBatch(Moves):
    needs = (FirstBatch,)


class LeavesALock(Moves):
    def move(self, norm: nn.Module, readers: list[nn.Module], block: BlockContext) -> None:
        super().move(norm, readers, block)
        norm.lock = threading.Lock()  # type: ignore[assignment]


class LeavesNan(Moves):
    def move(self, norm: nn.Module, readers: list[nn.Module], block: BlockContext) -> None:
        scale(norm, torch.nan)


class ToBfloat16(Moves):
    def move(self, norm: nn.Module, readers: list[nn.Module], block: BlockContext) -> None:
        for reader in readers:
            reader.to(torch.bfloat16)


class AtRandom(Moves):
    made = 0

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        type(self).made += 1
        self.factor = 2.0 ** (1 + self.made % 3)


class CountsStarts(Moves):
    started = 0

    def start(self, model: nn.Module, plan: object) -> Any:
        type(self).started += 1
        self.factor = 2.0**self.started
        return self


class Overwrites(Moves):
    """Assumes that no other transform has touched the norm: its weights are those at the start."""

    def start(self, model: nn.Module, plan: object) -> Any:
        weights = {name: p.detach().clone() for name, p in model.named_parameters() if "norm" in name}
        return StartedOverwriting(self.factor, weights)


class StartedOverwriting(TransformRun):
    def __init__(self, factor: float, weights: Mapping[str, Tensor]) -> None:
        self.factor, self.weights = factor, weights

    def apply(self, block: BlockContext) -> Mapping[str, Metrics]:
        name = block.architecture.attention_norm or ""
        norm: Any = block.module.get_submodule(name)
        norm.weight = nn.Parameter(self.weights[f"{block.name}.{name}.weight"] / self.factor, requires_grad=False)
        for reader in block.architecture.attention_inputs:
            scale(block.module.get_submodule(reader), self.factor)
        return {}


class Harms(Moves):
    """Keeps the function, and makes a few channels of weights so large that the others round to zero."""

    def move(self, norm: nn.Module, readers: list[nn.Module], block: BlockContext) -> None:
        weight: Any = norm.weight
        factors = torch.ones(len(weight))
        factors[::16] = 64.0
        scale(norm, 1 / factors)
        for reader in readers:
            scale(reader, factors)


@attrs.define(kw_only=True)
class RunSettings(Settings):
    def runs_with_model(self) -> bool:
        return True


class Runs(Moves):
    """Halves inputs while the model runs."""

    def move(self, norm: nn.Module, readers: list[nn.Module], block: BlockContext) -> None:
        for reader in readers:
            scale(reader, self.factor)
            reader.register_forward_pre_hook(halving(self.factor))


def halving(factor: float) -> Callable[..., Any]:
    return lambda module, args: (args[0] / factor,)


class RestoresNothing:
    def __init__(self, settings: object) -> None:
        pass

    def restore(self, model: nn.Module, config: object) -> None:
        pass

    def place_of(self, name: str, tensor: Tensor) -> str:
        return name


class LooksAhead(Moves):
    """Says that it works by block, and looks at the weights of the last one."""

    last: Any = None

    def start(self, model: nn.Module, plan: object) -> Any:
        self.last = list(model.parameters())[-3]
        return self

    def move(self, norm: nn.Module, readers: list[nn.Module], block: BlockContext) -> None:
        if float(self.last.abs().max()) > 0:
            super().move(norm, readers, block)


class StartedCounting(TransformRun):
    """Moves more with each block, and tells nobody how much that is."""

    def __init__(self, moves: Moves) -> None:
        self.step = self.factor = moves.factor

    def apply(self, block: BlockContext) -> Mapping[str, Metrics]:
        self.factor *= self.step
        moves = Moves(Settings())
        moves.factor = self.factor
        return moves.apply(block)


class RemembersBlocks(Moves):
    """Moves more with each new block, and keeps the sum on its class, which is lost with the process."""

    exponents: ClassVar[dict[str, int]] = {}

    def move(self, norm: nn.Module, readers: list[nn.Module], block: BlockContext) -> None:
        factor = 2.0 ** self.exponents.setdefault(block.name, 1 + len(self.exponents))
        scale(norm, 1 / factor)
        for reader in readers:
            scale(reader, factor)


class MovesValues(Moves):
    """Moves a power of two from the projection of values into the one that reads them."""

    def move(self, norm: nn.Module, readers: list[nn.Module], block: BlockContext) -> None:
        facts = block.architecture
        value, output = (block.module.get_submodule(name or "") for name in (facts.mlp_value, facts.mlp_output))
        self.move_rows(value, output, facts.mlp_value_rows)

    @torch.no_grad()
    def move_rows(self, value: Any, output: Any, rows: str) -> None:
        own = slice(-output.weight.shape[1], None) if rows == "last" else slice(None)
        for name, parameter in value.named_parameters():
            values = parameter.clone()
            values[own] /= self.factor
            setattr(value, name, nn.Parameter(values, requires_grad=False))
        scale(output, self.factor)


class ForgetsTheBias(MovesValues):
    def move_rows(self, value: Any, output: Any, rows: str) -> None:
        bias = value.bias
        super().move_rows(value, output, rows)
        value.bias = bias


class TakesTheFirstRows(MovesValues):
    """Knows nothing of fused projections: the first rows of one are the gate's."""

    @torch.no_grad()
    def move_rows(self, value: Any, output: Any, rows: str) -> None:
        for name, parameter in value.named_parameters():
            values = parameter.clone()
            values[: output.weight.shape[1]] /= self.factor
            setattr(value, name, nn.Parameter(values, requires_grad=False))
        scale(output, self.factor)


class AsksForUndeclared(Moves):
    def move(self, norm: nn.Module, readers: list[nn.Module], block: BlockContext) -> None:
        if block.statistic(block.architecture.attention_inputs[0], AbsMax) is not None:
            super().move(norm, readers, block)


class NeedsInputs(Moves):
    needs = (AbsMax,)


class Seeds(Moves):
    def start(self, model: nn.Module, plan: object) -> Any:
        torch.manual_seed(7)
        return self


class CountsBlocks(Moves):
    def start(self, model: nn.Module, plan: object) -> Any:
        return StartedCounting(self)


class StartedLearning(StartedCounting):
    def learned(self) -> Any:
        return self.factor

    def recall(self, learned: Any) -> None:
        self.factor = learned


class LearnsFromItsBlocks(Moves):
    """Moves more with each block, and says how much: the healthy transform."""

    def start(self, model: nn.Module, plan: object) -> Any:
        return StartedLearning(self)


class RoundsWithText(Moves):
    def rounding(self) -> Any:
        return "round-to-nearest"


HEALTHY = (record_of(LearnsFromItsBlocks),)
MOVES_VALUES = (record_of(MovesValues),)
"""A healthy one too: the two that move values wrongly differ from it in one thing each."""


def _mutant(
    check: str, about: str, processor: Any = Moves, config: type[AlgoConfig] = Settings, *, says: str = "", **fields: Any
) -> Mutant:
    return Mutant(f"transform:{check}", about, (record_of(processor, config, **fields),), says=says)


def _careless(name: str) -> type[Moves]:
    return type(name, (getattr(careless_transforms, name), Moves), {})


MUTANTS = (
    _mutant("is_made_of_its_settings", "needs a text", NeedsText),
    _mutant("default_settings_are_valid", "has settings that cannot be made without arguments", config=requiring_one(Settings)),
    _mutant("settings_survive_json", "forgets its settings in JSON", config=forgetting_all(Settings)),
    _mutant("refuses_unknown_settings", "takes every key", config=taking_every_key(Settings)),
    _mutant("describes_its_settings", "says nothing of its options", config=saying_nothing(Settings)),
    _mutant("heeds_its_options", "does nothing with one option", config=having_an_idle_one(Settings)),
    _mutant("statistics_are_sums_over_tokens", "looks at the first batch alone", ByFirstBatch),
    _mutant("is_copied_and_pickled", "leaves a lock in a norm", LeavesALock),
    _mutant("declares_calibration", "measures inputs and does not say so", NeedsInputs),
    _mutant("has_a_place_among_the_others", "goes before what goes before it", role="equalization", before=("rotation",)),
    _mutant("changes_something", "does nothing", DoesNothing),
    _mutant("keeps_the_function", "forgets the last reader of a norm", ForgetsReaders),
    _mutant("keeps_the_function", "leaves NaN", LeavesNan),
    _mutant("keeps_the_function", "scales a layer and not its bias", ForgetsTheBias),
    _mutant("keeps_the_function", "takes the first rows of a fused projection", TakesTheFirstRows),
    _mutant("keeps_the_function", "asks for a statistic that it does not declare", AsksForUndeclared),
    _mutant("keeps_the_function", "changes dtypes", ToBfloat16),
    _mutant("keeps_the_function_with_layers_excluded", "forgets readers that stay float", QuantizedReadersAlone),
    _mutant("keeps_the_function_with_dead_channels", "divides by the size of rows", _careless("DividesByZero")),
    _mutant("reports_what_it_applied", "does nothing and does not say so", DoesNothing),
    _mutant("leaves_nothing_behind", "leaves a parameter that requires gradients", _careless("WantsGradients")),
    _mutant("leaves_nothing_behind", "leaves a hook on the model", HooksOutside),
    _mutant("leaves_nothing_behind", "leaves a hook inside a block", HooksInside),
    _mutant("leaves_nothing_behind", "adds a parameter to a norm", AddsABias),
    _mutant("leaves_nothing_behind", "adds a buffer to the model", AddsABuffer),
    _mutant("leaves_nothing_behind", "makes a buffer an attribute that follows no .to()", RemovesABuffer, says="removes the buffer"),
    _mutant("leaves_nothing_behind", "runs with the model and has no restorer", Runs, RunSettings),
    _mutant("is_deterministic", "moves another factor each time", AtRandom),
    _mutant("is_deterministic", "seeds the generator of everybody", Seeds),
    _mutant("composes_with_other_transforms", "overwrites what another transform did", Overwrites, before=(), after=("equalization",)),
    _mutant("composes_with_other_transforms", "says nothing of its place, which matters", before=()),
    _mutant("composes_with_roundings", "makes some channels large", Harms),
    _mutant("does_no_harm", "makes some channels large", Harms),
    _mutant("works_on_an_accelerator", "multiplies by factors that it makes on the CPU", OfTheCpu),
    _mutant("reloads_to_the_same_logits", "has a restorer that restores nothing", Runs, RunSettings, restorer=ObjectRef(RestoresNothing)),
    _mutant("streams_to_the_same_bytes", "looks at weights of other blocks", LooksAhead),
    _mutant("resumes_to_the_same_bytes", "keeps to itself what goes on to the next block", CountsBlocks),
    _mutant("resumes_to_the_same_bytes", "keeps on its class what goes on to the next block", RemembersBlocks),
    _mutant("is_the_same_on_two_ranks", "moves another factor each time that it is started", CountsStarts),
    _mutant("its_rounding_is_one", "has a text for a rounding", RoundsWithText),
)
