"""Every check of the conformance suite catches a broken plugin, and passes a healthy one."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from quark_devkit import all_checks, run_check
from quark_devkit.extent import LAWS, OF_DISTRIBUTIONS, WHOLE_RUNS
from quark_devkit.runner import OUTCOMES
from quark_devkit.subject import KINDS

from .law_mutants import of_laws
from .mutant import Mutant, subject_among

MODULES = {kind: importlib.import_module(f".{kind}_mutants", __package__) for kind in KINDS}
OF_LAWS = of_laws(all_checks())
MUTANTS: list[Mutant] = [*(mutant for module in MODULES.values() for mutant in module.MUTANTS), *OF_LAWS]

QUICK_KINDS = {"dataset", "format", "graph_op", "layer_type", "metric", "quant_mode", "selector", "template"}
"""Kinds of plugins that are checked in a moment: the suite tries all of their mutants."""
QUICK = [mutant for mutant in MUTANTS if mutant.check.partition(":")[0] in QUICK_KINDS and mutant not in OF_LAWS]
FIRST = {mutant.check: mutant for mutant in reversed(MUTANTS) if mutant not in (*QUICK, *OF_LAWS)}
"""The mutant of each check of the other kinds. The suite tries every second one, and every seventh of the
laws of every kind, of which each is one function; all others are slow."""
SUITE = {mutant.id for mutant in [*QUICK, *list(FIRST.values())[::2], *OF_LAWS[::7]]}


def test_every_check_has_a_mutant() -> None:
    proven = {mutant.check for mutant in MUTANTS}
    proven |= {f"{kind}:can_be_checked" for kind in KINDS}  # one function for all kinds: devkit/tests/test_catalogue.py
    assert [check for check in all_checks() if check not in proven] == []
    assert len(MUTANTS) >= len(all_checks())


def test_checks_that_take_long_are_checks() -> None:
    assert {check.name for check in all_checks().values()} >= WHOLE_RUNS | LAWS | OF_DISTRIBUTIONS


def marks(mutant: Mutant) -> list[pytest.MarkDecorator]:
    slow = [] if mutant.id in SUITE else [pytest.mark.slow]
    return [*slow, pytest.mark.posix("no limit of a file's size")] if mutant.about == "takes no notice of a full disk" else slow


@pytest.mark.parametrize("mutant", [pytest.param(mutant, id=mutant.id, marks=marks(mutant)) for mutant in MUTANTS])
def test_the_check_catches_the_mutant(mutant: Mutant, tmp_path: Path) -> None:
    check = all_checks()[mutant.check]
    if mutant.subject is not None:
        with mutant.subject(tmp_path) as subject:
            result = run_check(subject, check)
    else:
        plugin = mutant.registers() if mutant.registers is not None else None
        result = run_check(subject_among(check.kind, mutant.records, plugin), check)
    wanted = "advised" if check.level == "advisory" else "failed"
    assert result.outcome == wanted, f"{mutant.about}: {OUTCOMES[result.outcome]}"
    assert result.message
    assert mutant.says in result.message


def test_a_transform_that_moves_values_as_it_should_passes() -> None:
    subject = subject_among("transform", MODULES["transform"].MOVES_VALUES)
    result = run_check(subject, all_checks()["transform:keeps_the_function"])
    assert result.outcome == "passed", result.message


@pytest.mark.parametrize("name", ["computes_what_the_layer_computes", "has_a_scale_for_each_output", "applies_its_quantizers"])
def test_a_layer_that_is_made_with_four_sizes_passes(name: str) -> None:
    result = run_check(subject_among("layer_type", MODULES["layer_type"].OF_FOUR_SIZES), all_checks()[f"layer_type:{name}"])
    assert result.outcome == "passed", result.message


def test_a_metric_of_right_tokens_that_no_model_excludes_passes() -> None:
    result = run_check(subject_among("metric", MODULES["metric"].OF_RIGHT_TOKENS), all_checks()["metric:takes_excluded_tokens"])
    assert result.outcome == "passed", result.message


def test_a_template_that_names_no_values_has_none_to_pass_on() -> None:
    result = run_check(subject_among("template", MODULES["template"].WITHOUT_VALUES), all_checks()["template:values_pass_linearly"])
    assert result.outcome == "not applicable", result.message


@pytest.mark.slow_runs
@pytest.mark.one_in(4)
@pytest.mark.parametrize("check", all_checks().values(), ids=lambda check: check.id)
def test_the_check_passes_the_healthy_plugin(check: object) -> None:
    healthy = MODULES[check.kind].HEALTHY  # type: ignore[attr-defined]
    if healthy is None:
        pytest.skip("the healthy subject of this kind is a real distribution, which its own tests check")
    result = run_check(subject_among(check.kind, healthy), check)  # type: ignore[attr-defined, arg-type]
    assert result.outcome in ("passed", "not applicable"), result.message
