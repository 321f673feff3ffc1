"""Mutants of the laws of every kind: healthy plugins that do a misdeed whenever they work.

A misdeed gets what the plugin was given, and returns a small number, by which the plugin changes its result.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import BlockContext, BranchTask, Metrics, RoundedBlock, RoundingTask
from quark.base.lazy import ObjectRef
from quark.checkpoint import CheckpointContent, ExportOptions
from quark.config.layer import QLayerConfig
from quark.plugins import Record
from quark_devkit.works import WORKS
from quark_workbench.mixed_precision import Selection

from . import (
    block_tuning_mutants,
    branch_mutants,
    broken_formats,
    broken_roundings,
    dataset_mutants,
    format_mutants,
    healthy_layouts,
    layer_type_mutants,
    metric_mutants,
    observer_mutants,
    quant_mode_mutants,
    rounding_mutants,
    scheme_mutants,
    selector_mutants,
    transform_mutants,
)
from .mutant import Mutant

__all__ = ["of_laws"]

_COUNT = itertools.count()
_KEPT: list[Any] = []
Misdeed = Callable[..., int]


def looks_at_the_environment(*given: Any) -> int:
    return int("PATH" in os.environ)


def hashes(*given: Any) -> int:
    return hash("a text") % 9973


def counts(*given: Any) -> int:
    return next(_COUNT)


def looks_at_the_default_dtype(*given: Any) -> int:
    return torch.get_default_dtype().itemsize.bit_length()


def looks_at_threads(*given: Any) -> int:
    return torch.get_num_threads()


def sets_a_variable(*given: Any) -> int:
    os.environ["MUTANT_QUANT"] = "1"
    return 0


def keeps(*given: Any) -> int:
    _KEPT.extend(given or [nn.Linear(2, 2)])
    return 0


def looks_at_the_directory(*given: Any) -> int:
    return len(os.getcwd()) % 97


def opens_a_file(*given: Any) -> int:
    _KEPT.append(Path(__file__).open("rb"))  # noqa: SIM115 - left open on purpose
    return 0


def prints(*given: Any) -> int:
    print("at work")
    return 0


MISDEEDS: dict[str, Misdeed] = {
    "does_the_same_in_a_fresh_process": looks_at_the_environment,
    "does_the_same_again": counts,
    "does_the_same_in_any_default_dtype": looks_at_the_default_dtype,
    "does_the_same_on_any_number_of_threads": looks_at_threads,
    "leaves_the_process_as_it_was": sets_a_variable,
    "keeps_nothing_alive": keeps,
    "prints_nothing": prints,
}


class Format(broken_formats.Plain):
    misdeed: Misdeed

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return super().round_(t.add_(type(self).misdeed(t)), zero)


class Observer(observer_mutants.PlainObserver):
    misdeed: Misdeed

    def observe(self, x: Tensor) -> None:
        super().observe(x * (1 + type(self).misdeed(x)))


class Rounding(broken_roundings.Plain):
    misdeed: Misdeed

    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        by = 1 + 0.1 * type(self).misdeed(*task.layers.values())
        for layer in task.layers.values():
            broken_roundings.put(layer, layer.weight * by)  # type: ignore[operator]
        return super().round(task)


class Transform(transform_mutants.Moves):
    misdeed: Misdeed

    def apply(self, block: BlockContext) -> Mapping[str, Metrics]:
        self.factor *= 2.0 ** (type(self).misdeed(block.module) % 16 + 1)
        return super().apply(block)


class Tuning(block_tuning_mutants.Nudges):
    misdeed: Misdeed

    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        self.step = 0.1 / (1 + type(self).misdeed(*block.parameters.values()))
        return super().tune(block)


class Branch(branch_mutants.Lost):
    misdeed: Misdeed

    def tensors(self, task: BranchTask) -> Mapping[str, Tensor]:
        by = 1 + 0.1 * type(self).misdeed(task.weight)
        return {name: tensor * by for name, tensor in super().tensors(task).items()}


class Layout(healthy_layouts.Sharing):
    misdeed: Misdeed

    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        super().export(content, out, options)
        number = type(self).misdeed(content.model)
        healthy_layouts.changed_json(out / "config.json", lambda data: data.update(number=number))


class Selector(selector_mutants.LastFirst):
    misdeed: Misdeed

    def select(self, problem: Any) -> Any:
        number = type(self).misdeed()
        choices = {name: list(sizes)[(number + i) % len(sizes)] for i, (name, sizes) in enumerate(problem.sizes.items())}
        return Selection(choices)


class Layer(layer_type_mutants.QuantGained):
    misdeed: Misdeed

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y * (1 + type(self).misdeed(x))


@attrs.frozen
class Function:
    """A function of a healthy plugin, with a misdeed before it."""

    misdeed: Misdeed


class Scheme(Function):
    def __call__(self) -> QLayerConfig:
        return scheme_mutants.build(group_size=8 * (1 + self.misdeed()))


class Dataset(Function):
    def __call__(self, path: Path) -> Iterator[Any]:
        yield f"{next(dataset_mutants.healthy(path))} {self.misdeed()}"


class Metric(Function):
    def __call__(self, log_q: Tensor, targets: Tensor, log_p: Tensor | None = None) -> Tensor:
        return metric_mutants.healthy(log_q, targets) + self.misdeed(log_q)


class Mode(Function):
    def __call__(self, model: nn.Module, config: Any, data: Any = None) -> Any:
        return quant_mode_mutants.quantize(model, config, codes=127 - self.misdeed(model) % 64)


def _with_class(base: type[Any], misdeed: Misdeed, name: str) -> type[Any]:
    """Return a subclass that other processes find in this module."""
    made = type(name, (base,), {"misdeed": staticmethod(misdeed), "__module__": __name__})
    globals()[name] = made
    return made


def _records(kind: str, misdeed: Misdeed) -> tuple[Record, ...]:
    """Return the records of a healthy plugin of a kind, the first one with a misdeed."""
    bases: dict[str, type[Any]] = {"format": Format, "observer": Observer, "rounding": Rounding, "transform": Transform}
    bases |= {"block_tuning": Tuning, "branch": Branch, "layout": Layout, "selector": Selector, "layer_type": Layer}
    made = _with_class(bases[kind], misdeed, f"{bases[kind].__name__}That{misdeed.__name__}") if kind in bases else None
    records: dict[str, Callable[[], tuple[Record, ...]]] = {
        "format": lambda: (format_mutants.record_of(made()),),  # type: ignore[misc]
        "observer": lambda: (observer_mutants.record_of(made),),  # type: ignore[arg-type]
        "rounding": lambda: (rounding_mutants.record_of(made),),
        "transform": lambda: (transform_mutants.record_of(made),),
        "block_tuning": lambda: (block_tuning_mutants.record_of(made),),
        "branch": lambda: (branch_mutants.record_of(made),),
        "layout": lambda: (healthy_layouts.record_of(made),),
        "selector": lambda: (selector_mutants.record_of(made),),
        "layer_type": lambda: (layer_type_mutants.record_of(made),),
        "scheme": lambda: (attrs.evolve(scheme_mutants.HEALTHY[0], config=ObjectRef(Scheme(misdeed))),),
        "dataset": lambda: (dataset_mutants.record_of(Dataset(misdeed)),),
        "metric": lambda: (attrs.evolve(metric_mutants.HEALTHY[0], metric=ObjectRef(Metric(misdeed))),),
        "quant_mode": lambda: (attrs.evolve(quant_mode_mutants.HEALTHY[0], quantize=ObjectRef(Mode(misdeed))),),
    }
    return records[kind]()


def of_laws(checks: Mapping[str, Any]) -> list[Mutant]:
    """Return a mutant for each law of each kind.

    Args:
        checks: The catalogue, by id.
    """
    return [
        Mutant("metric:does_the_same_in_a_fresh_process", "depends on hashes", _records("metric", hashes)),
        Mutant("metric:does_the_same_in_a_fresh_process", "depends on the directory", _records("metric", looks_at_the_directory)),
        Mutant("metric:keeps_nothing_alive", "leaves a file open", _records("metric", opens_a_file)),
        *(
            Mutant(f"{kind}:{law}", misdeed.__name__.replace("_", " "), _records(kind, misdeed))
            for kind in WORKS
            for law, misdeed in MISDEEDS.items()
            if f"{kind}:{law}" in checks
        ),
    ]
