"""The selector: within its budget, better than what it could have chosen otherwise, and its curve."""

from __future__ import annotations

from itertools import pairwise

import attrs
import pytest

from quark.errors import ConfigError
from quark.plugins import selectors
from quark_workbench.mixed_precision import Budget, selector_of
from quark_workbench.mixed_precision.by_sensitivity import MixedPrecision, measured_kl
from quark_workbench.mixed_precision.by_sensitivity.knapsack import loss_of
from quark_workbench.mixed_precision.by_sensitivity.selector import losses_of

from .problems import chosen, problem_of


def test_it_is_registered_and_made_of_its_options() -> None:
    name, selector = selector_of(None, {"sensitivity": "output", "points": 5})
    assert (name, selector) == ("mixed_precision", MixedPrecision(sensitivity="output", points=5))
    assert {option.name for option in selectors().options("amp")} >= {"sensitivity", "tokens", "points", "measured"}
    assert all(option.help for option in selectors().options("amp"))


def test_an_unknown_sensitivity_is_refused() -> None:
    with pytest.raises(ConfigError, match="no sensitivity 'fihser': use one of fisher, kl, output"):
        MixedPrecision(sensitivity="fihser")


@pytest.mark.parametrize(("name", "least"), [("tokens", 1), ("points", 2), ("measured", 0), ("measured_tokens", 1)])
def test_an_option_may_be_as_small_as_its_message_says(name: str, least: int) -> None:
    assert getattr(MixedPrecision(**{name: least}), name) == least  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{name}={least - 1} is too small: give at least {least}$"):
        MixedPrecision(**{name: least - 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("sensitivity", ["fisher", "output", "kl"])
def test_the_budget_is_kept_and_used(sensitivity: str) -> None:
    result = chosen(sensitivity)
    most = result.problem.most_bytes or 0
    assert result.group_bytes <= most
    # Nothing that is smaller than a group's step is left over, or the step would do no good.
    for group, own in result.selection.choices.items():
        for name, size in result.problem.sizes[group].items():
            fits = result.group_bytes - result.problem.sizes[group][own] + size <= most
            assert not fits or result.selection.losses[group][name] >= result.selection.losses[group][own]


def test_it_diverges_less_than_the_first_and_last_layers_in_the_larger_scheme() -> None:
    result = chosen("fisher")
    problem = problem_of("fp8", "mxfp4", sequences=8)
    ends = dict.fromkeys(problem.sizes, "mxfp4")
    names = list(problem.sizes)
    for name in sorted(names, key=lambda one: min(names.index(one), len(names) - 1 - names.index(one))):
        if problem.bytes_of(ends | {name: "fp8"}) <= (result.problem.most_bytes or 0):
            ends[name] = "fp8"
    own, heuristic, uniform = measured_kl(problem, [result.selection.choices, ends, dict.fromkeys(names, "mxfp4")], 512)
    assert own < heuristic < uniform


def test_at_the_size_of_a_candidate_the_choice_is_not_predicted_to_be_worse_than_that_candidate_alone() -> None:
    problem = problem_of("fp8", "mxfp6_e2m3", "mxfp4")
    losses = losses_of(problem, "fisher", 256)
    selector, predicted = MixedPrecision(measured=0, points=2), {}
    for name in problem.candidates:
        alone = dict.fromkeys(problem.sizes, name)
        budget = Budget(size=problem.bytes_of(alone) + problem.other_bytes)
        selection = selector.select_by(attrs.evolve(problem, budget=budget), losses)
        predicted[name] = (loss_of(losses, selection.choices), loss_of(losses, alone))
    assert all(choice <= alone for choice, alone in predicted.values())
    assert predicted["fp8"][0] < predicted["mxfp6_e2m3"][0] < predicted["mxfp4"][0]


def test_the_curve_goes_from_the_smallest_to_the_largest_with_falling_losses() -> None:
    result = chosen("fisher")
    curve = result.selection.curve
    assert (curve[0].group_bytes, curve[-1].group_bytes) == (result.problem.smallest, result.problem.largest)
    assert all(a.group_bytes < b.group_bytes and a.loss > b.loss for a, b in pairwise(curve))
    assert any(dict(point.choices) == dict(result.selection.choices) and point.measured_kl is not None for point in curve)
    assert sum(point.measured_kl is not None for point in curve) == 3  # both ends and the choice


def test_predicted_and_measured_divergence_are_compared() -> None:
    (note,) = chosen("fisher").selection.notes
    assert note.startswith("measured divergence is ")
    assert chosen("output").selection.notes == ()  # not in nats


def test_a_divergence_is_met_by_the_fewest_bytes() -> None:
    result = chosen("fisher", bits=None, kl=0.01)
    points = {point.group_bytes: point.measured_kl for point in result.selection.curve if point.measured_kl is not None}
    assert points[result.group_bytes] <= 0.01
    below = [size for size, kl in points.items() if size < result.group_bytes]
    assert below
    assert all(points[size] > 0.01 for size in below)


def test_a_divergence_out_of_reach_is_refused_with_the_range() -> None:
    with pytest.raises(
        ConfigError, match=r"divergence of 1e-07 nats per token cannot be met with fp8, mxfp4: they reach .* to .*Give a larger"
    ):
        chosen("fisher", bits=None, kl=1e-7)


def test_what_is_chosen_is_the_same_again() -> None:
    again = MixedPrecision(points=3, measured=0)
    problem = problem_of("fp8", "mxfp4", sequences=2)
    assert again.select(problem) == again.select(problem)
