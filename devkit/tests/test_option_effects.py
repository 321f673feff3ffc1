"""Options that are accepted and ignored are found, and those that are not are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Annotated, Any

import attrs
import pytest
from attrs import validators

from quark.errors import ConfigError
from quark.plugins.options import Option, OptionNote, options_of
from quark_devkit.check import CheckFailedError, NotApplicableError
from quark_devkit.option_effects import require_effects


@attrs.define(kw_only=True)
class Settings:
    steps: int = 4
    share: float | None = None
    is_fast: bool = False
    mode: str = attrs.field(default="best", validator=validators.in_(("best", "plain")))
    target: Annotated[str, OptionNote(examples=("k_proj",))] = ""
    layers: tuple[str, ...] = ()
    size: Annotated[int, OptionNote(is_cost_only=True)] = 128
    seed: Annotated[int, OptionNote(beside={"is_fast": True})] = 0
    old: int = attrs.field(default=1, metadata={"unused": True})


OPTIONS = options_of(Settings)


def heeding(*names: str) -> Any:
    """Results that depend on these options: of a target on one value, of a seed where it is used."""

    def results(values: Mapping[str, Any]) -> Iterator[object]:
        settings = Settings(**values)
        facts = {name: getattr(settings, name) for name in names}
        if "target" in facts:
            facts["target"] = settings.target == "k_proj"
        if "seed" in facts:
            facts["seed"] = settings.is_fast and settings.seed
        yield "the same each time"
        yield facts

    return results


HEEDED = ("steps", "share", "is_fast", "mode", "target", "layers", "seed")


def test_options_that_change_a_result_pass_and_unused_fields_are_none() -> None:
    assert [option.name for option in OPTIONS] == [*HEEDED[:-1], "size", "seed"]
    require_effects(OPTIONS, heeding(*HEEDED))


@pytest.mark.parametrize("ignored", HEEDED)
def test_an_option_that_is_ignored_is_named(ignored: str) -> None:
    with pytest.raises(CheckFailedError, match=f"nothing: '{ignored}' "):
        require_effects(OPTIONS, heeding(*(name for name in HEEDED if name != ignored)))


def test_an_option_of_which_no_other_value_is_accepted_is_not_ignored() -> None:
    def results(values: Mapping[str, Any]) -> list[int]:
        if values:
            raise ConfigError("not supported")
        return [1]

    require_effects([Option("is_learned", bool, False)], results)


def test_present_values_are_those_that_are_compared_with() -> None:
    def results(values: Mapping[str, Any]) -> list[int]:
        return [int(values.get("steps", 8))]

    require_effects([Option("steps", int, 16)], results, {"steps": 8})
    with pytest.raises(CheckFailedError, match=r"'steps' \(8 gives the results of 16\)"):
        require_effects([Option("steps", int, 16)], results)


@pytest.mark.parametrize(
    ("option", "effect"),
    [(Option("size", int, 32), lambda v: min(v, 64)), (Option("factor", float, 1.0), round), (Option("bits", int, 4), lambda v: v > 4)],
    ids=["saturates", "is rounded to whole numbers", "is a switch"],
)
def test_an_option_that_heeds_some_values_only_is_named(option: Option, effect: Callable[[Any], object]) -> None:
    with pytest.raises(CheckFailedError, match=f"nothing: '{option.name}' "):
        require_effects([option], lambda values: [effect(values.get(option.name, option.default))])


IDLE = OptionNote(beside={"is_fast": False})


@pytest.mark.parametrize(("note", "is_named"), [(OptionNote(), True), (IDLE, False)], ids=["and does not say so", "and says so"])
def test_an_option_that_does_nothing_beside_a_boolean_is_named(note: OptionNote, *, is_named: bool) -> None:
    def results(values: Mapping[str, Any]) -> list[object]:
        is_fast = values.get("is_fast", False)
        return [is_fast, 0 if is_fast else values.get("steps", 4)]

    with pytest.raises(CheckFailedError, match="nothing with is_fast=True") if is_named else nullcontext():
        require_effects([Option("steps", int, 4, note=note), Option("is_fast", bool, False)], results)


def test_without_options_there_is_nothing_to_look_at() -> None:
    with pytest.raises(NotApplicableError, match="no options that change a result"):
        require_effects([Option("size", int, 1, note=OptionNote(is_cost_only=True))], lambda values: [values])


def test_a_run_of_the_same_values_is_made_once() -> None:
    runs: list[dict[str, Any]] = []

    def results(values: Mapping[str, Any]) -> Iterator[object]:
        runs.append(dict(values))
        yield {"steps": 4, "share": 0.5, "is_fast": False} | dict(values)

    require_effects([Option("steps", int, 4), Option("share", float, 0.5), Option("is_fast", bool, False)], results)
    assert len(runs) == len({repr(sorted(values.items())) for values in runs})
    assert {"is_fast": True} in runs
