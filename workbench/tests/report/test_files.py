"""The schema of reports: reports follow it, and what differs from it is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
