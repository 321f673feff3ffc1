"""The plugin API is the recorded one of its version: what is gone or called differently has raised the number, or left an alias."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from quark.plugins.api_version import API_VERSION, RENAMED
from tools.plugin_api import names
from tools.plugin_api.names import breaks, current, imports_of, path_of, recorded

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/plugins/compatibility.md"
RENAMES = re.findall(r"^\| `([^|]+)` \| `([^`|]+)`[^|]*\|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
PLACES = ("quark.algorithms", "quark.numbers", "quark.checkpoint", "quark.plugins")
"""Where a class is that the table names without its module."""


def test_nothing_is_gone_without_a_higher_number() -> None:
    assert path_of(API_VERSION).is_file(), "run python -m tools.plugin_api --write"
    assert breaks(recorded(API_VERSION), current()) == []


def test_what_is_new_is_recorded() -> None:
    before, now = recorded(API_VERSION), current()
    assert {name for name in now if name not in before or before[name] != now[name]} == set(), "run python -m tools.plugin_api --write"


def test_what_no_page_shows_any_more_stays_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_shown", set)
    assert names.current() == recorded(API_VERSION)


def test_the_record_holds_hooks_fields_methods_and_arguments() -> None:
    known = recorded(API_VERSION)
    assert "quark.plugins.QuarkHooks.quark_register_schemes" in known
    assert "*shares_global_scale=" in str(known["quark.plugins.SchemeRecord"])
    assert known["quark.numbers.Granularity.reduce_scale"] == "self, expanded, shape"
    assert known["quark.algorithms.Rounding.applies_to"] == "self, name"
    assert not any("test_" in name for name in known)


@pytest.mark.parametrize(
    ("before", "now", "complaint"),
    [
        ({"a.F": "x"}, {"a.F": "x"}, None),
        ({"a.F": "x"}, {"a.F": "x, y="}, None),
        ({"a.F": "x"}, {"a.F": "x, *y="}, None),
        ({"a.F": "x"}, {"a.F": "x=", "a.G": None}, None),
        ({"a.F": "x, *y="}, {"a.F": "x, y="}, None),
        ({"a.F": None}, {"a.F": "x"}, None),
        ({"a.F": "x"}, {}, "a.F is gone"),
        ({"a.F.name": None}, {"a.F": ""}, "a.F.name is gone"),
        ({"a.F": "x"}, {"a.F": None}, "can no longer be called"),
        ({"a.F": "x, y"}, {"a.F": "x"}, "has lost the parameter 'y'"),
        ({"a.F": "x"}, {"a.F": "x, y"}, "asks for a new parameter 'y'"),
        ({"a.F": "*x="}, {"a.F": "*x=, *y"}, "asks for a new parameter 'y'"),
        ({"a.F": "x, y="}, {"a.F": "x, y"}, "asks for the parameter 'y', which had a default"),
        ({"a.F": "x, y"}, {"a.F": "y, x"}, "in another order"),
    ],
)
def test_a_break_is_noticed(before: dict[str, str | None], now: dict[str, str | None], complaint: str | None) -> None:
    broken = breaks(before, now)
    assert (complaint in broken[0] and "docs/plugins/compatibility.md" in broken[0]) if complaint else broken == []


def test_code_that_imports_from_quark_shows_names() -> None:
    assert set(imports_of("import torch\nfrom quark.a import b, c\ndef f():\n    from quark.d import e\nfrom quarks import g")) == {
        ("quark.a", "b"),
        ("quark.a", "c"),
        ("quark.d", "e"),
    }


def test_the_error_of_an_old_plugin_names_the_page_with_the_table() -> None:
    assert str(PAGE.relative_to(ROOT)) in RENAMED
    assert len(RENAMES) >= 40


def test_new_names_of_the_table_of_renames_are_there_and_old_ones_are_not() -> None:
    assert [new for _, new in RENAMES if not _exists(new)] == []
    assert [old for old, _ in RENAMES if old.startswith("quark.") and _exists(old)] == []


def _exists(name: str) -> bool:
    """Whether a module, a name in one, or a member (its class without a module, as in the table) is there."""
    name = name.partition("(")[0]
    parts = name.split(".")
    if not parts[0].startswith("quark"):
        value = next((found for place in PLACES if (found := getattr(import_module(place), parts[0], None)) is not None), None)
        return value is not None and (len(parts) == 1 or hasattr(value, parts[1]) or parts[1] in getattr(value, "__annotations__", {}))
    for end in range(len(parts), 0, -1):
        try:
            value = import_module(".".join(parts[:end]))
        except ImportError:  # what has left the core says where it is
            continue
        for part in parts[end:]:
            value = getattr(value, part, None)
        return value is not None
    return False
