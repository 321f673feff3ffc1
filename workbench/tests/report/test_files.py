"""The schema of reports: reports follow it, and what differs from it is found."""

from __future__ import annotations

from typing import Any

import pytest

from quark_workbench.report.files import report_schema, violations

from .reports import contents

RUNS = [("int4_wo_64",), ("mxfp4",), ("int4_wo_64", "gptq"), ("int4_wo_64", "awq", "gptaq")]


@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_a_report_follows_its_schema(run: tuple[str, ...]) -> None:
    assert list(violations(contents(*run))) == []


@pytest.mark.parametrize("change", [{"layers": [{}]}, {"format_version": 2}, {"flags": [{"level": "blue"}]}, {"files": None}])
def test_the_schema_refuses_what_is_no_report(change: dict[str, Any]) -> None:
    assert list(violations(contents(*RUNS[0]) | change))


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
