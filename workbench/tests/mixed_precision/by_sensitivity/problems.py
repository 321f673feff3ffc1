"""Problems on the tiny model, as a selector gets them."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

from quark_tiny_model import calibration_batches, tiny_model
from quark_workbench.mixed_precision import Budget, Selection, SelectionProblem, SelectionResult, select_schemes


class Keeps:
    """A selector that keeps its problem."""

    def __init__(self) -> None:
        self.problem: SelectionProblem | None = None

    def select(self, problem: SelectionProblem) -> Selection:
        self.problem = problem
        return Selection({name: min(sizes, key=lambda one: sizes[one]) for name, sizes in problem.sizes.items()})


def problem_of(*names: str, model: nn.Module | None = None, sequences: int = 4, data: Any = None) -> SelectionProblem:
    keeps = Keeps()
    data = calibration_batches(sequences, 64) if data is None else data
    select_schemes(tiny_model() if model is None else model, names, Budget(kl=1.0), data, selector=keeps)
    assert keeps.problem is not None
    return keeps.problem


@cache
def chosen(sensitivity: str = "fisher", *names: str, bits: float | None = 5.0, kl: float | None = None) -> SelectionResult:
    """A selection of the selector of this distribution, made once for all tests."""
    options: dict[str, Any] = {"sensitivity": sensitivity, "points": 9, "measured": 2, "measured_tokens": 256}
    budget = Budget(bits=bits, kl=kl)
    data = calibration_batches(4, 64)
    return select_schemes(tiny_model(), names or ("fp8", "mxfp4"), budget, data, selector="mixed_precision", selector_options=options)
