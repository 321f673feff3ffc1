"""Selectors with one thing wrong each."""

from __future__ import annotations

from typing import Any

import torch

from quark.base.lazy import ObjectRef
from quark.plugins import SelectorRecord
from quark_workbench.mixed_precision import CurvePoint, Selection, SelectionProblem

from .mutant import Mutant

__all__ = ["HEALTHY", "MUTANTS"]


class LastFirst:
    """Gives the last groups the larger candidate within the budget; mutants change one thing."""

    def select(self, problem: SelectionProblem) -> Any:
        choices = {name: min(sizes, key=lambda one: sizes[one]) for name, sizes in problem.sizes.items()}
        smallest = CurvePoint(problem.smallest, 1.0, dict(choices))
        for name, sizes in reversed(list(problem.sizes.items())):
            larger = choices | {name: max(sizes, key=lambda one: sizes[one])}
            if problem.most_bytes is None or problem.bytes_of(larger) <= problem.most_bytes:
                choices = larger
        return Selection(choices, curve=(smallest, CurvePoint(problem.bytes_of(choices), 0.5, choices)))


class WantsAnOption:
    def __init__(self, share: float) -> None:
        self.share = share

    def select(self, problem: SelectionProblem) -> Any:
        return LastFirst().select(problem)


class ReturnsADict(LastFirst):
    def select(self, problem: SelectionProblem) -> Any:
        return super().select(problem).choices


class ForgetsAGroup(LastFirst):
    def select(self, problem: SelectionProblem) -> Any:
        choices = dict(super().select(problem).choices)
        choices.popitem()
        return Selection(choices)


class Overspends(LastFirst):
    def select(self, problem: SelectionProblem) -> Any:
        return Selection({name: max(sizes, key=lambda one: sizes[one]) for name, sizes in problem.sizes.items()})


class AtRandom(LastFirst):
    made = 0

    def select(self, problem: SelectionProblem) -> Any:
        type(self).made += 1
        choices = {name: min(sizes, key=lambda one: sizes[one]) for name, sizes in problem.sizes.items()}
        names = list(choices)
        name = names[self.made % len(names)]
        return Selection(choices | {name: max(problem.sizes[name], key=lambda one: problem.sizes[name][one])})


class LeavesAHook(LastFirst):
    def select(self, problem: SelectionProblem) -> Any:
        problem.model.register_forward_hook(lambda *_: None)
        return super().select(problem)


class RoundsWeights(LastFirst):
    @torch.no_grad()
    def select(self, problem: SelectionProblem) -> Any:
        for parameter in problem.model.parameters():
            if not parameter.is_meta:
                parameter.round_()
        return super().select(problem)


class FreezesTheModel(LastFirst):
    def select(self, problem: SelectionProblem) -> Any:
        problem.model.requires_grad_(False)
        return super().select(problem)


class LooksAtUnloadedWeights(LastFirst):
    """Goes by the weights of the model without loading them, which are not there when it is on disk."""

    def select(self, problem: SelectionProblem) -> Any:
        first = problem.model.get_submodule(problem.groups[0].layers[0]).weight
        if bool(first.abs().sum() < 0):  # type: ignore[operator]
            raise AssertionError
        return super().select(problem)


class OfTwoCandidates(LastFirst):
    def select(self, problem: SelectionProblem) -> Any:
        for sizes in problem.sizes.values():
            _smaller, _larger = sizes
        return super().select(problem)


class OfBytesAlone(LastFirst):
    def select(self, problem: SelectionProblem) -> Any:
        if problem.most_bytes is None:
            raise TypeError("no bytes")
        return super().select(problem)


class WithAnIdleOption(LastFirst):
    def __init__(self, first: int = 2) -> None:
        self.first = first


class CurveFromTheLargest(LastFirst):
    def select(self, problem: SelectionProblem) -> Any:
        selection = super().select(problem)
        return Selection(selection.choices, curve=selection.curve[::-1])


class CurveOfOtherSizes(LastFirst):
    def select(self, problem: SelectionProblem) -> Any:
        selection = super().select(problem)
        return Selection(selection.choices, curve=(CurvePoint(1, 1.0, selection.choices),))


def record_of(selector: Any = LastFirst) -> SelectorRecord:
    return SelectorRecord(name="mutant_selector", selector=ObjectRef(selector))


def _mutant(check: str, about: str, selector: Any) -> Mutant:
    return Mutant(f"selector:{check}", about, (record_of(selector),))


HEALTHY = (record_of(),)
MUTANTS = (
    _mutant("is_made_without_options", "wants an option", WantsAnOption),
    _mutant("chooses_for_every_group", "returns a dict", ReturnsADict),
    _mutant("chooses_for_every_group", "forgets a group", ForgetsAGroup),
    _mutant("keeps_the_budget", "chooses the largest candidates", Overspends),
    _mutant("chooses_the_same_again", "chooses another group each time", AtRandom),
    _mutant("leaves_the_model_as_it_was", "leaves a hook", LeavesAHook),
    _mutant("leaves_the_model_as_it_was", "rounds weights", RoundsWeights),
    _mutant("leaves_the_model_as_it_was", "wants no gradients any more", FreezesTheModel),
    _mutant("chooses_the_same_from_disk", "looks at weights that it has not loaded", LooksAtUnloadedWeights),
    _mutant("chooses_among_three_candidates", "counts on two candidates", OfTwoCandidates),
    _mutant("chooses_under_any_budget", "counts on a budget of bytes", OfBytesAlone),
    _mutant("heeds_its_options", "does nothing with one option", WithAnIdleOption),
    _mutant("gives_an_ordered_curve", "gives a curve from the largest to the smallest", CurveFromTheLargest),
    _mutant("gives_an_ordered_curve", "says other sizes than its choices take", CurveOfOtherSizes),
)
