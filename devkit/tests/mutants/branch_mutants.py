"""Branches with one thing wrong each."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import AbsMean, Branching, BranchSite, BranchTask
from quark.base.lazy import ObjectRef
from quark.config.algorithm import AlgoConfig
from quark.models.layers import Branch
from quark.plugins import AlgorithmRecord

from .broken_settings import forgetting_all, having_an_idle_one, requiring_one, saying_nothing, taking_every_key
from .broken_statistics import FirstBatch
from .mutant import Mutant

__all__ = ["HEALTHY", "MUTANTS"]


@attrs.define(kw_only=True)
class Settings(AlgoConfig):
    """Settings of the healthy branch.

    Attributes:
        rank: Rank of the product.
    """

    name: str = "mutant_branch"
    rank: int = 4

    def runs_with_model(self) -> bool:
        return True


class Thin(Branch):
    def __init__(self, rank: int, shape: tuple[int, int], dtype: torch.dtype | None) -> None:
        super().__init__()
        rank = min(rank, *shape)
        self.down = nn.Parameter(torch.empty(rank, shape[1], dtype=dtype), requires_grad=False)
        self.register_buffer("up", torch.empty(shape[0], rank, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.down.dtype) @ self.down.t() @ self.get_buffer("up").t()


class Lost(Branching):
    """The first singular directions of the error, by the mean magnitudes of inputs: the healthy branch."""

    needs = (AbsMean,)

    def __init__(self, settings: Settings) -> None:
        self.rank = settings.rank

    def branch(self, site: BranchSite) -> Branch | None:
        return Thin(self.rank, site.shape, site.dtype)

    def tensors(self, task: BranchTask) -> Mapping[str, Tensor]:
        assert task.rounded is not None
        statistic = task.statistic(AbsMean)
        size = torch.ones(task.site.shape[1]) if statistic is None or not statistic.tokens else statistic.value.cpu().clamp(min=1e-6)
        u, s, v = torch.linalg.svd((task.weight - task.rounded).cpu().float() * size, full_matrices=False)
        rank = min(self.rank, *task.site.shape)
        made = {"down": s[:rank, None] * v[:rank] / size, "up": u[:, :rank]}
        return {name: tensor.to(task.weight) for name, tensor in made.items()}


def record_of(processor: Any = Lost, config: type[AlgoConfig] = Settings, name: str = "mutant_branch", **fields: Any) -> AlgorithmRecord:
    fields = {"capabilities": {"calibration"}, **fields}
    return AlgorithmRecord(name=name, kind="branch", config=ObjectRef(config), processor=ObjectRef(processor), **fields)


@attrs.define(kw_only=True)
class Silent(Settings):
    """Settings that do not say what runs.

    Attributes:
        rank: Rank of the product.
    """

    def runs_with_model(self) -> bool:
        return False


class IsNoBranching:
    needs = ()

    def __init__(self, settings: Settings) -> None:
        pass


class OfTheDefaultDtype(Lost):
    def branch(self, site: BranchSite) -> Branch | None:
        return Thin(self.rank, site.shape, None)


class GrowsAsItIsAsked(Lost):
    """Declares a larger product for each layer than for the one before."""

    asked: ClassVar[int] = 0

    def branch(self, site: BranchSite) -> Branch | None:
        type(self).asked += 1
        return Thin(1 + self.asked, site.shape, site.dtype)


class Transposes(Lost):
    def tensors(self, task: BranchTask) -> Mapping[str, Tensor]:
        return {name: tensor.t().contiguous() for name, tensor in super().tensors(task).items()}


class ForgetsOne(Lost):
    def tensors(self, task: BranchTask) -> Mapping[str, Tensor]:
        return {"down": super().tensors(task)["down"]}


class NeedsTokens(Lost):
    def tensors(self, task: BranchTask) -> Mapping[str, Tensor]:
        if task.statistic(AbsMean) is None:
            raise ValueError("no tokens")
        return super().tensors(task)


class ChangesTheWeight(Lost):
    def tensors(self, task: BranchTask) -> Mapping[str, Tensor]:
        made = super().tensors(task)
        task.weight.mul_(2)
        return made


class OfGroupsAlone(Lost):
    """Cannot work with scales of a second level."""

    def tensors(self, task: BranchTask) -> Mapping[str, Tensor]:
        if isinstance(task.site.config.weight, (list, tuple)):
            raise ValueError("one level is wanted")
        return super().tensors(task)


class AddsZeros(Lost):
    def tensors(self, task: BranchTask) -> Mapping[str, Tensor]:
        return {name: torch.zeros_like(tensor) for name, tensor in super().tensors(task).items()}


class ByFirstBatch(Lost):
    needs = (FirstBatch,)


class AddsTheWrongSign(Lost):
    def tensors(self, task: BranchTask) -> Mapping[str, Tensor]:
        made = super().tensors(task)
        return {**made, "up": -3 * made["up"]}


class Counts(Lost):
    """Goes by how many branches it has made in this process."""

    made: ClassVar[int] = 0

    def tensors(self, task: BranchTask) -> Mapping[str, Tensor]:
        type(self).made += 1
        return {name: tensor * (1 + 0.01 * self.made) for name, tensor in super().tensors(task).items()}


class CountsItsBranches(Counts):
    """The same, as a class that other processes can import."""


class OfTheCpu(Lost):
    def tensors(self, task: BranchTask) -> Mapping[str, Tensor]:
        made = super().tensors(task)
        return {**made, "up": made["up"] * torch.ones(made["up"].shape, dtype=task.site.dtype)}


class Keeps(Thin):
    """Adds a value that no checkpoint holds."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * super().forward(x)


class KeepsAValue(Lost):
    def branch(self, site: BranchSite) -> Branch | None:
        self.last = Keeps(self.rank, site.shape, site.dtype)
        return self.last

    def tensors(self, task: BranchTask) -> Mapping[str, Tensor]:
        self.last.gain = 1.5
        return super().tensors(task)


class Locks(Thin):
    """Holds a lock, which can be neither copied nor pickled."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lock = Lock()


class HoldsALock(Lost):
    def branch(self, site: BranchSite) -> Branch | None:
        return Locks(self.rank, site.shape, site.dtype)


class OfSequences(Thin):
    def forward(self, x: Tensor) -> Tensor:
        sequences, _tokens, _channels = x.shape
        return super().forward(x) * (sequences > 0)


class OfSomeTokens(Thin):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / x.amax() * x.amax())


class Scales(Thin):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5)) * 2


class Remembers(Thin):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return super().forward(x)


class Recalls(Thin):
    """Computes once for each shape of inputs."""

    def forward(self, x: Tensor) -> Tensor:
        known: dict[Any, Tensor] = vars(self).setdefault("known", {})
        return known.setdefault(x.shape, super().forward(x))


class HalvesTheStatistic(Lost):
    def tensors(self, task: BranchTask) -> Mapping[str, Tensor]:
        statistic = task.statistic(AbsMean)
        if statistic is not None:
            statistic._sum *= 0.5
        return super().tensors(task)


def making(kind: type[Thin]) -> type[Lost]:
    """Return a branching whose branches have that class."""
    return type(f"Lost{kind.__name__}", (Lost,), {"branch": lambda self, site: kind(self.rank, site.shape, site.dtype)})


HEALTHY = (record_of(),)


def _mutant(check: str, about: str, processor: Any = Lost, config: type[AlgoConfig] = Settings, **fields: Any) -> Mutant:
    return Mutant(f"branch:{check}", about, (record_of(processor, config, **fields),))


MUTANTS = (
    _mutant("is_made_of_its_settings", "makes an object of another class", IsNoBranching),
    _mutant("is_made_of_its_settings", "has settings that do not say what runs", config=Silent),
    _mutant("default_settings_are_valid", "has settings that cannot be made without arguments", config=requiring_one(Settings)),
    _mutant("settings_survive_json", "forgets its settings in JSON", config=forgetting_all(Settings)),
    _mutant("refuses_unknown_settings", "takes every key", config=taking_every_key(Settings)),
    _mutant("describes_its_settings", "says nothing of its options", config=saying_nothing(Settings)),
    _mutant("calibration_is_declared", "does not say that it needs data", capabilities=()),
    _mutant("statistics_are_sums_over_tokens", "looks at the first batch alone", ByFirstBatch),
    _mutant("is_declared_by_its_arguments_alone", "takes the default dtype", OfTheDefaultDtype),
    _mutant("is_declared_by_its_arguments_alone", "counts how often it is asked", GrowsAsItIsAsked),
    _mutant("makes_what_it_declares", "makes tensors of other shapes", Transposes),
    _mutant("makes_what_it_declares", "makes one tensor of two", ForgetsOne),
    _mutant("makes_what_it_declares", "wants tokens of every layer", NeedsTokens),
    _mutant("makes_what_it_declares", "changes the float weight", ChangesTheWeight),
    _mutant("makes_what_it_declares", "changes a statistic", HalvesTheStatistic),
    _mutant("computes_the_same_at_every_call", "computes once for each shape", making(Recalls)),
    _mutant("computes_for_inputs_of_any_shape", "takes three axes alone", making(OfSequences)),
    _mutant("computes_for_inputs_of_any_shape", "wants a token", making(OfSomeTokens)),
    _mutant("computes_for_inputs_of_any_shape", "changes its input", making(Scales)),
    _mutant("computes_for_inputs_of_any_shape", "keeps its input", making(Remembers)),
    _mutant("makes_branches_in_every_format", "takes one level of scales alone", OfGroupsAlone),
    _mutant("heeds_its_options", "does nothing with one option", config=having_an_idle_one(Settings)),
    _mutant("adds_something", "adds zeros", AddsZeros),
    _mutant("does_no_harm", "adds the error once more", AddsTheWrongSign),
    _mutant("composes_with_others", "adds the error once more", AddsTheWrongSign),
    _mutant("is_deterministic", "goes by what it has made before", type("Counts", (Counts,), {})),
    _mutant("is_the_same_on_two_ranks", "goes by what it has made before", type("Counts", (Counts,), {})),
    _mutant("works_on_an_accelerator", "multiplies by a tensor that it makes on the CPU", OfTheCpu),
    _mutant("reloads_to_the_same_logits", "keeps a value beside its tensors", KeepsAValue),
    _mutant("is_copied_and_pickled", "holds a lock in each branch", HoldsALock),
    _mutant("streams_to_the_same_bytes", "goes by what it has made before", type("Counts", (Counts,), {})),
    _mutant("resumes_to_the_same_bytes", "counts the branches of its process", CountsItsBranches),
)
