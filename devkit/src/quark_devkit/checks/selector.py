"""Checks that selectors choose a scheme for every group, stay within the budget, are repeatable, and have no
side effects.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.errors import PluginError, QuarkError
from quark_devkit.check import CheckFailedError, assume, check, require
from quark_devkit.option_effects import require_effects
from quark_devkit.small_models import batches, coarse_scheme, fitting_schemes, run_config, saved, small_model
from quark_devkit.subject import Subject
from quark_devkit.whole_runs import is_same
from quark_workbench.mixed_precision import FLOAT, Budget, Selection, SelectionProblem, select_schemes, selector_of

SHARES = (0.0, 0.3, 0.7, 1.0)
"""Tested budgets: positions between the smallest and the largest size of the groups."""


@attrs.define
class _Asked:
    """A selector that calls another selector and records the problem and that selector's answer. It returns
    its own valid choice."""

    selector: Any = None
    problem: Any = None
    selection: Any = None

    def select(self, problem: SelectionProblem) -> Selection:
        self.problem = problem
        if self.selector is not None:
            self.selection = self.selector.select(problem)
        return Selection({name: min(sizes, key=lambda one: sizes[one]) for name, sizes in problem.sizes.items()})


def asked(
    subject: Subject,
    share: float = 0.3,
    model: nn.Module | Path | None = None,
    options: Mapping[str, Any] | None = None,
    candidates: Sequence[str] | None = None,
) -> tuple[SelectionProblem, Any]:
    """Return a problem and the selector's answer.

    The budget of the problem is ``share`` of the way from the smallest to the largest reachable size.
    """
    whole = small_model() if model is None else model
    limits, asking = _Asked(), _Asked(selector_of(subject.lookup_name, options)[1])
    _select(whole, Budget(kl=1.0), batches(1), limits, candidates)
    smallest, largest = (size + limits.problem.other_bytes for size in (limits.problem.smallest, limits.problem.largest))
    _select(whole, Budget(size=smallest + int(share * (largest - smallest))), batches(2), asking, candidates)
    return asking.problem, asking.selection


def _select(model: nn.Module | Path, budget: Budget, data: list[Tensor], selector: _Asked, candidates: Sequence[str] | None = None) -> None:
    scheme = coarse_scheme()
    select_schemes(model, candidates or [scheme, FLOAT], budget, data, base=run_config(scheme), selector=selector)


def _require_a_choice_of_each(problem: SelectionProblem, selection: Any) -> None:
    require(isinstance(selection, Selection), f"returns a {type(selection).__name__}: return a quark_workbench.mixed_precision.Selection")
    for name, sizes in problem.sizes.items():
        chosen = selection.choices.get(name)
        require(chosen in sizes, f"chooses {chosen!r} for '{name}', whose candidates are {', '.join(sizes)}")


@check("selector")
def is_made_without_options(subject: Subject) -> None:
    """The selector can be created without options and has a method ``select``."""
    selector_of(subject.lookup_name)


@check("selector")
def chooses_for_every_group(subject: Subject) -> None:
    """The selector returns a Selection with a fitting candidate for each group."""
    _require_a_choice_of_each(*asked(subject))


@check("selector", since=2)
def chooses_among_three_candidates(subject: Subject) -> None:
    """With three candidates, too, the selector chooses one for each group and stays within the budget."""
    others = [name for name in fitting_schemes() if name != coarse_scheme()]
    assume(others, "fewer than three candidates fit the small model")
    problem, selection = asked(subject, candidates=[coarse_scheme(), others[-1], FLOAT])
    _require_a_choice_of_each(problem, selection)
    taken = problem.bytes_of(selection.choices)
    require(taken <= (problem.most_bytes or 0), f"chooses {taken:,} bytes among three candidates, but {problem.most_bytes:,} are allowed")


@check("selector", since=2)
def chooses_under_any_budget(subject: Subject) -> None:
    """If the budget limits the divergence instead of bytes, the selector chooses for each group or raises an
    error of quark."""
    asking = _Asked(selector_of(subject.lookup_name)[1])
    try:
        _select(small_model(), Budget(kl=1.0), batches(2), asking)
    except PluginError as error:
        raise CheckFailedError(f"fails for a budget that limits the divergence: {error}") from None
    except QuarkError:
        return
    _require_a_choice_of_each(asking.problem, asking.selection)


@check("selector", since=2)
def heeds_its_options(subject: Subject) -> None:
    """Different values of an option give different choices, losses or curves. A value may be refused instead,
    and an option may be declared to change only the cost."""

    def results(values: Mapping[str, Any]) -> Iterator[Any]:
        for share in (0.3, 0.7):
            selection = asked(subject, share, options=values)[1]
            yield dict(selection.choices), {name: dict(of) for name, of in selection.losses.items()}, selection.curve

    require_effects(subject.registry.options(subject.lookup_name), results)


@check("selector")
def keeps_the_budget(subject: Subject) -> None:
    """The choices stay within the budget, for budgets from the smallest to the largest reachable size."""
    for share in SHARES:
        problem, selection = asked(subject, share)
        most, taken = problem.most_bytes or 0, problem.bytes_of(selection.choices)
        require(taken <= most, f"chooses {taken:,} bytes, but {most:,} are allowed")


@check("selector")
def chooses_the_same_again(subject: Subject) -> None:
    """The selector makes the same choices each time."""
    first, second = (asked(subject)[1].choices for _ in range(2))
    different = [name for name in first if first[name] != second.get(name)]
    require(not different, f"chooses a different candidate for '{different[0] if different else ''}' the second time")


@check("selector")
def leaves_the_model_as_it_was(subject: Subject) -> None:
    """Parameters, their ``requires_grad``, modules, hooks and modes of the model stay unchanged."""
    model = small_model().requires_grad_(True)
    before = _state(model)
    asked(subject, model=model)
    after = _state(model)
    require(before.keys() == after.keys(), "adds modules or tensors to the model, or removes some")
    changed = [name for name, value in before.items() if not is_same(value, after[name])]
    require(not changed, f"changes '{changed[0] if changed else ''}' of the model")


@check("selector")
def chooses_the_same_from_disk(subject: Subject) -> None:
    """If a checkpoint is loaded block by block, the choices are the same as for the model in memory."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        path = saved(Path(directory), torch.float32)
        from_disk = asked(subject, model=path)[1].choices
    in_memory = asked(subject)[1].choices
    different = [name for name, chosen in in_memory.items() if from_disk.get(name) != chosen]
    require(not different, f"chooses a different candidate for '{different[0] if different else ''}' from disk than in memory")


@check("selector")
def gives_an_ordered_curve(subject: Subject) -> None:
    """If the selector returns a curve, sizes increase and losses decrease from point to point, and the size
    of each point is the size of its choices.
    """
    problem, selection = asked(subject)
    assume(selection.curve, "it returns no curve")
    for point in selection.curve:
        taken = problem.bytes_of(point.choices)
        require(taken == point.group_bytes, f"has a point of {point.group_bytes:,} bytes, but its choices take {taken:,}")
    for smaller, larger in pairwise(selection.curve):
        require(smaller.group_bytes < larger.group_bytes, "has points that are not sorted by size")
        require(smaller.loss >= larger.loss, f"has a point of {larger.group_bytes:,} bytes with a larger loss than a smaller point")


def _state(model: nn.Module) -> dict[str, Any]:
    """Return all state of a model that a selector might change."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        hooks = [len(value) for key, value in sorted(vars(module).items()) if key.endswith("hooks")]
        state[f"{name} ({type(module).__name__})"] = (module.training, hooks, "forward" in vars(module))
    for name, parameter in model.named_parameters():
        state[name] = parameter.detach().clone()
        state[f"requires_grad of {name}"] = (parameter.requires_grad, parameter.grad is None)
    return state
