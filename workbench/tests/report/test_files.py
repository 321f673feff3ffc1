"""The schema of reports: reports follow it, and what differs from it is found."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from quark.errors import CheckpointError
from quark_workbench.report.export_report import export_report
from quark_workbench.report.files import report_schema, violations, write_contents

from .reports import contents

RUNS = [("int4_wo_64",), ("mxfp4",), ("int4_wo_64", "gptq"), ("int4_wo_64", "awq", "gptaq")]


@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_a_report_follows_its_schema(run: tuple[str, ...]) -> None:
    assert list(violations(contents(*run))) == []


@pytest.mark.parametrize("change", [{"layers": [{}]}, {"format_version": 2}, {"flags": [{"level": "blue"}]}, {"files": None}])
def test_the_schema_refuses_what_is_no_report(change: dict[str, Any]) -> None:
    assert list(violations(contents(*RUNS[0]) | change))


@pytest.mark.posix("few users of Windows may make links")
def test_a_link_is_replaced_and_what_it_points_to_stays(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "quark_report.html").symlink_to(tmp_path / "precious")
    (directory / "quark_report.json").symlink_to(tmp_path / "missing")
    write_contents(contents(*RUNS[0]), directory)
    assert (tmp_path / "precious").read_text() == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "precious"]
    assert {path.name: path.is_symlink() for path in directory.iterdir()} == dict.fromkeys(
        ("quark_report.html", "quark_report.json"), False
    )


KEYWORDS = {"$schema", "$defs", "$ref", "title", "description", "type", "required", "properties", "items", "enum", "oneOf"}


def test_the_schema_uses_no_keyword_that_is_not_obeyed() -> None:
    found: set[str] = set()

    def collect(schema: Any) -> None:
        found.update(schema)
        for part in (*schema.get("properties", {}).values(), *schema.get("$defs", {}).values(), *schema.get("oneOf", ())):
            collect(part)
        if "items" in schema:
            collect(schema["items"])

    collect(report_schema())
    assert found <= KEYWORDS


WRONG: tuple[Any, ...] = (-1, 1.5, 2**70, 1e308, "x", [], {"x": 1}, None)


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*at, key)
        yield from _places(inner, (*at, key))


@pytest.mark.thorough
def test_a_report_with_any_value_exchanged_is_shown_or_refused(tmp_path: Path) -> None:
    plain = contents(*RUNS[0])
    one_of_each = {tuple(key for key in at if isinstance(key, str)): at for at in _places(plain)}
    for at in one_of_each.values():
        for wrong in random.Random(str(at)).sample(WRONG, 2):
            changed = copy.deepcopy(plain)
            owner = changed
            for key in at[:-1]:
                owner = owner[key]
            owner[at[-1]] = wrong
            (tmp_path / "quark_report.json").write_text(json.dumps(changed))
            with suppress(CheckpointError):
                write_contents(export_report(tmp_path), tmp_path)


def test_a_report_of_which_no_page_can_be_made_is_damaged(tmp_path: Path) -> None:
    changed = copy.deepcopy(contents(*RUNS[0]))
    changed["settings"]["calibration"]["samples"] = 1.5
    (tmp_path / "quark_report.json").write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match=r"quark_report\.json' is damaged"):
        export_report(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["quark_report.json"]
