"""Options are read from signatures and fields of settings, and values that are given are checked against
them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import attrs
import pytest

from quark.errors import ConfigError, UnsupportedError
from quark.plugins.options import Option, called, checked, options_of


def scheme(group_size: int = 32, factor: float = 1.0, *, static: bool = False, mode: Literal["a", "b"] = "a", anything=None) -> None:  # type: ignore[no-untyped-def]
    """A scheme.

    Args:
        group_size, factor: Of a group, and
            a second line.
        static: Whether ``static``.

    Raises:
        mode: Not an argument's help.
    """


@attrs.define(kw_only=True)
class Base:
    """Base.

    Attributes:
        preset: From the base.
        alpha: Told by the base.
    """

    name: str = "base"
    preset: str = attrs.field(default="best", validator=attrs.validators.in_(("best", "reference")))


@attrs.define(kw_only=True)
class Settings(Base):
    """Settings.

    Attributes:
        alpha: Told by the class.
    """

    alpha: float | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.lt(1)))
    layers: list[str] = attrs.field(factory=list)
    wanted: int
    old: int = attrs.field(default=1, metadata={"legacy": True})
    inner: dict[str, int] | None = attrs.field(default=None, converter=lambda value: value)


class Exporter:
    """An exporter."""

    def __init__(self, level: int = 3, **more: Any) -> None:
        """Nothing to see."""


def by_name(target: Any, **more: Any) -> dict[str, Option]:
    return {option.name: option for option in options_of(target, **more)}


def test_a_function_shows_its_arguments_with_type_default_and_help() -> None:
    found = by_name(scheme)
    assert list(found) == ["group_size", "factor", "static", "mode", "anything"]
    assert found["factor"].to_dict() == {
        "name": "factor",
        "type": "float",
        "default": 1.0,
        "required": False,
        "help": "Of a group, and a second line.",
    }
    assert found["static"].help == "Whether static."
    assert found["mode"].help == ""
    assert found["anything"].type is Any


def test_settings_show_their_fields_and_no_legacy_ones() -> None:
    found = by_name(Settings, without=("name",))
    assert list(found) == ["preset", "alpha", "layers", "wanted", "inner"]
    assert (found["preset"].help, found["alpha"].help) == ("From the base.", "Told by the class.")
    assert (found["layers"].default, found["wanted"].to_dict()["required"]) == ([], True)
    assert (found["alpha"].type_text, str(found["layers"])) == ("float | None", "layers=[] (list[str])")


def test_a_class_shows_its_constructor() -> None:
    assert [str(option) for option in options_of(Exporter)] == ["level=3 (int)"]
    assert options_of(type("Plain", (), {})) == ()


@pytest.mark.parametrize(
    ("hint", "fit", "unfit"),
    [
        (int, [1, -2], [1.0, True, "1", None]),
        (float, [1, 1.5], [True, "1.5", None]),
        (bool, [True, False], [0, 1, "false"]),
        (str, ["a"], [1, None]),
        (str | None, ["a", None], [1]),
        (Literal["a", "b"], ["a"], ["c"]),
        (list[str], [["a"], []], ["a", [1], {}]),
        (tuple[str, ...], [["a"]], ["a", [1]]),
        (Sequence[float], [[1, 2.5]], [["a"], 1.0]),
        (dict[str, int], [{}], [[], 1]),
        (Settings, [{}, 1, "x"], []),
        (Any, [object()], []),
    ],
)
def test_values_are_held_against_types(hint: Any, fit: list[Any], unfit: list[Any]) -> None:
    known = [Option("key", hint)]
    for value in fit:
        checked("it", known, {"key": value})
    for value in unfit:
        with pytest.raises(ConfigError, match=r"it needs .* for the option 'key'"):
            checked("it", known, {"key": value})


def test_integers_stand_for_floats_and_lists_for_tuples() -> None:
    known = [Option("a", float), Option("b", tuple[str, ...]), Option("c", int | float), Option("d", float | None)]
    found = checked("it", known, {"a": 1, "b": ["x"], "c": 1, "d": 2})
    assert found == {"a": 1.0, "b": ("x",), "c": 1, "d": 2.0}
    assert [type(value) for value in found.values()] == [float, tuple, int, float]


def test_all_that_is_wrong_is_told_at_once_with_the_nearest_name_and_what_there_is() -> None:
    with pytest.raises(ConfigError) as error:
        checked("the scheme 's'", options_of(scheme), {"grop_size": 16, "static": "no"})
    assert str(error.value) == (
        "the scheme 's' has no option 'grop_size'. Did you mean 'group_size'? "
        "the scheme 's' needs bool for the option 'static', not 'no' (str). "
        "Its options: group_size=32 (int), factor=1.0 (float), static=False (bool), mode='a' (Literal['a', 'b']), anything=None (Any)"
    )


def test_a_value_that_is_refused_is_one_sentence() -> None:
    for given, says in (({"alpha": 2.0}, "'alpha' must be < 1: 2.0"), ({"preset": "x"}, "'preset' must be in .* \\(got 'x'\\)$")):
        with pytest.raises(ConfigError, match=f"it refuses .*: {says}"):
            called("it", Settings, {"wanted": 1, **given})


def test_errors_that_are_meant_pass_as_they_are() -> None:
    def refuses() -> None:
        raise UnsupportedError("not on Mondays")

    with pytest.raises(UnsupportedError, match=r"^not on Mondays$"):
        called("it", refuses, {})
