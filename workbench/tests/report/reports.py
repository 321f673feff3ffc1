"""Reports of runs on the tiny model, each made once."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate
from quark_tiny_model import calibration_batches, tiny_model_dir
from quark_workbench.report import ReportOptions, read_report


@cache
def exported(scheme: str = "int4_wo_64", *algorithms: str, level: str = "standard") -> Path:
    """The export of a run that has written a report."""
    out = Path(tempfile.mkdtemp()) / "out"
    config = LLMTemplate.get("llama").get_config(scheme=scheme, algorithm=list(algorithms) or None)
    data = calibration_batches(4, 128)
    quantize_checkpoint(tiny_model_dir(), out, config, data if algorithms else None, report=ReportOptions(level, "quark quantize …"))
    return out


def contents(scheme: str = "int4_wo_64", *algorithms: str, level: str = "standard") -> dict[str, Any]:
    """The contents of the report of that run."""
    report = read_report(exported(scheme, *algorithms, level=level))
    assert report is not None
    return report
