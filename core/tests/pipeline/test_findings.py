"""What a run says at its end, and how loudly."""

from __future__ import annotations

import logging

import pytest

from quark.pipeline.findings import Findings


def test_that_all_is_well_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    findings = Findings(tokens={"experts.0.up_proj": 212, "experts.1.up_proj": 279})
    with caplog.at_level(logging.INFO):
        findings.log()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.message == "Calibration reached 2 layers of experts with 212 to 279 tokens, 246 on average."


def test_layers_with_few_tokens_are_one() -> None:
    findings = Findings(tokens={"experts.0.up_proj": 1, **{f"experts.{i}.up_proj": 100 for i in range(1, 9)}})
    (line,) = findings.lines()
    assert line.startswith("1 of 9 layers of experts got less than 5% of the average of 89 tokens; the least, 'experts.0.up_proj', 1.")


def test_unreached_layers_are_one() -> None:
    findings = Findings()
    findings.missed(["a", "b"])
    (line,) = findings.lines()
    assert line.startswith("No calibration token reached 2 layer(s), the first is 'a'")
