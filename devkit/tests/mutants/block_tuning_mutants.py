"""Tunings with one thing wrong each."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import Metrics, RoundedBlock, Tuning
from quark.base.lazy import ObjectRef
from quark.config.algorithm import AlgoConfig
from quark.plugins import AlgorithmRecord

from .broken_settings import forgetting_all, having_an_idle_one, requiring_one, saying_nothing, taking_every_key
from .mutant import Mutant

__all__ = ["HEALTHY", "MUTANTS"]


@attrs.define(kw_only=True)
class Settings(AlgoConfig):
    """Settings of the healthy tuning.

    Attributes:
        step: First change of a norm or bias, relative to its mean magnitude.
    """

    name: str = "mutant_tuning"
    step: float = 0.1


STEPS = 8


class Nudges(Tuning):
    """Moves norms and biases against the signs of their gradients: the healthy tuning that mutants change."""

    def __init__(self, settings: Settings) -> None:
        self.step = settings.step

    @torch.no_grad()
    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        for number in range(STEPS):
            leaves = {name: parameter.clone().requires_grad_() for name, parameter in block.parameters.items()}
            with torch.enable_grad(), block.substituted(leaves):
                squares = [(block.output(each, None) - each.target).square().sum(1)[~each.is_held_out] for each in block.samples]
                gradients = torch.autograd.grad(torch.cat(squares).mean(), list(leaves.values()))
            for parameter, gradient in zip(block.parameters.values(), gradients, strict=True):
                parameter.sub_(gradient.sign(), alpha=self.step * (1 - number / STEPS) * float(parameter.abs().mean()))
        return {}


def record_of(processor: Any = Nudges, config: type[AlgoConfig] = Settings, name: str = "mutant_tuning", **fields: Any) -> AlgorithmRecord:
    return AlgorithmRecord(name=name, kind="block_tuning", config=ObjectRef(config), processor=ObjectRef(processor), **fields)


class LeavesALock(Nudges):
    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        next(iter(block.layers.values())).lock = threading.Lock()  # type: ignore[assignment]
        return super().tune(block)


class IsNoTuning:
    def __init__(self, settings: Settings) -> None:
        pass

    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        return {}


class OfTheCpu(Nudges):
    @torch.no_grad()
    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        for parameter in block.parameters.values():
            parameter.mul_(torch.ones(parameter.shape))
        return super().tune(block)


class DoesNothing(Nudges):
    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        return {}


class LeavesTheGrid(Nudges):
    @torch.no_grad()
    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        for name, layer in block.layers.items():
            layer.weight = nn.Parameter(block.float_weights[name].clone(), requires_grad=False)
        return {}


class LeavesNan(Nudges):
    @torch.no_grad()
    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        for parameter in block.parameters.values():
            parameter.fill_(torch.nan)
        return {}


class MovesItsTargets(Nudges):
    """Spoils the block, and makes its spoilt outputs the target by which the pipeline validates it."""

    @torch.no_grad()
    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        for parameter in block.parameters.values():
            parameter.mul_(0.2)
        for sample in block.samples:
            sample.target.copy_(block.output(sample, None))
        return {}


class Counts(Nudges):
    """Goes by how many blocks it has tuned in this process, or since it was made."""

    tuned = 0
    of_its_own = False

    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        owner = self if self.of_its_own else type(self)
        owner.tuned += 1
        self.step = 0.01 * (1 + owner.tuned % 5)
        return super().tune(block)


class CountsItsBlocks(Counts):
    of_its_own = True


class LeavesAHook(Nudges):
    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        next(iter(block.layers.values())).register_forward_hook(lambda *_: None)
        return super().tune(block)


class ChangesProducts(Nudges):
    """Makes a layer multiply its output, which no checkpoint holds."""

    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        layer: Any = next(iter(block.layers.values()))
        product = layer.product

        def larger(x: Tensor) -> Tensor:
            output: Tensor = product(x) * 1.001
            return output

        object.__setattr__(layer, "product", larger)
        return super().tune(block)


class RemembersBlocks(Nudges):
    """Goes by how many blocks its class knows, which is lost with the process."""

    known: ClassVar[dict[str, int]] = {}

    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        count = self.known.setdefault(block.name, 1 + len(self.known))
        self.step = 0.01 * count
        return super().tune(block)


class Seeds(Nudges):
    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        torch.manual_seed(7)
        return super().tune(block)


HEALTHY = (record_of(),)


def _mutant(check: str, about: str, processor: Any = Nudges, config: type[AlgoConfig] = Settings) -> Mutant:
    return Mutant(f"block_tuning:{check}", about, (record_of(processor, config),))


MUTANTS = (
    _mutant("is_made_of_its_settings", "makes an object of another class", IsNoTuning),
    _mutant("default_settings_are_valid", "has settings that cannot be made without arguments", config=requiring_one(Settings)),
    _mutant("settings_survive_json", "forgets its settings in JSON", config=forgetting_all(Settings)),
    _mutant("refuses_unknown_settings", "takes every key", config=taking_every_key(Settings)),
    _mutant("describes_its_settings", "says nothing of its options", config=saying_nothing(Settings)),
    _mutant("heeds_its_options", "does nothing with one option", config=having_an_idle_one(Settings)),
    Mutant(
        "block_tuning:has_a_place_among_the_others",
        "goes before what goes before it",
        (record_of(before=("mutant_other",)), record_of(name="mutant_other", before=("mutant_tuning",))),
    ),
    _mutant("changes_something", "does nothing", DoesNothing),
    _mutant("tunes_every_format", "leaves float weights", LeavesTheGrid),
    _mutant("tunes_every_format", "leaves NaN", LeavesNan),
    _mutant("changes_values_alone", "leaves a hook on a layer", LeavesAHook),
    _mutant("does_no_harm", "moves the targets that it is validated by", MovesItsTargets),
    _mutant("composes_with_roundings", "moves the targets that it is validated by", MovesItsTargets),
    _mutant("is_deterministic", "goes by what it has done before", type("Counts", (Counts,), {})),
    _mutant("is_deterministic", "seeds the generator of everybody", Seeds),
    _mutant("works_on_an_accelerator", "multiplies by a tensor that it makes on the CPU", OfTheCpu),
    _mutant("is_copied_and_pickled", "leaves a lock in a block", LeavesALock),
    _mutant("reloads_to_the_same_logits", "changes what layers compute", ChangesProducts),
    _mutant("streams_to_the_same_bytes", "goes by what it has done before", type("Counts", (Counts,), {})),
    _mutant("resumes_to_the_same_bytes", "counts the blocks of its process", CountsItsBlocks),
    _mutant("resumes_to_the_same_bytes", "keeps on its class which blocks it has seen", RemembersBlocks),
)
