"""Files of a report: ``quark_report.json`` and ``quark_report.html`` beside the weights of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quark.calibration.report import CalibrationReport
from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.destination import REPORT_FILES
from quark.errors import CheckpointError
from quark.models.hf.json_files import read_json
from quark_workbench.report.contents import FORMAT, FORMAT_VERSION, Facts, contents_of
from quark_workbench.report.page import page
from quark_workbench.report.schema import violations

__all__ = ["read_report", "write_contents", "write_report"]

_JSON, _HTML = REPORT_FILES


def write_report(content: CheckpointContent, report: CalibrationReport, directory: Path, facts: Facts) -> dict[str, Any]:
    """Write both files of a report into a checkpoint, and return the contents; arguments as of `contents_of`."""
    contents = contents_of(content, report, directory, facts)
    write_contents(contents, directory)
    return contents


def write_contents(contents: dict[str, Any], directory: Path) -> None:
    """Write contents as JSON and as a page."""
    (directory / _JSON).write_text(json.dumps(contents, indent=1, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")
    (directory / _HTML).write_text(page(contents), encoding="utf-8")


def read_report(directory: Path) -> dict[str, Any] | None:
    """Return the contents of a checkpoint's report; None where it has none.

    Raises:
        CheckpointError: The file is damaged, or of another version of the format.
    """
    path = directory / _JSON
    if not path.is_file():
        return None
    contents = read_json(path)
    if contents.get("format") != FORMAT or contents.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"'{path}' is not a report of format {FORMAT} {FORMAT_VERSION}: it was written by another version. Remove it, and make it anew "
            "with quark report --float MODEL"
        )
    if error := next(violations(contents), None):
        raise CheckpointError(f"'{path}' is damaged: {error}. Remove it, and make it anew with quark report --float MODEL")
    return contents
