"""The cells of the matrix, which are sets of versions that are tested together; the tests of each cell; and
the results."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import attrs

__all__ = ["CELLS", "PACKAGES", "RESULTS", "ROOT", "TESTS", "Cell", "Result", "read", "write"]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs/data/versions.json"


@attrs.frozen
class Cell:
    """A set of versions that are tested together.

    Attributes:
        python: Version of Python, such as ``"3.13"``.
        torch, transformers: Versions of the packages.
        why: Why these versions are tested.
        constraints: A file with the versions of other packages. If it is empty, the newest versions are
            installed.
    """

    python: str
    torch: str
    transformers: str
    why: str
    constraints: str = ""

    @property
    def name(self) -> str:
        """The name of the cell on the command line, such as ``"3.13-2.14.1-5.24.0"``."""
        return f"{self.python}-{self.torch}-{self.transformers}"


CELLS = (
    Cell("3.11", "2.10.0", "5.4.0", "the lowest that the packages allow", "constraints-lowest.txt"),
    Cell("3.12", "2.10.0", "5.17.0", "llm-compressor 0.14"),
    Cell("3.11", "2.13.0", "5.19.0", "vLLM 0.32"),
    Cell("3.11", "2.14.1", "5.19.0", "SGLang 0.5.23"),
    Cell("3.13", "2.13.0", "5.23.0", "development"),
    Cell("3.13", "2.14.1", "5.24.0", "the newest when the table was made"),
)

TESTS = (
    "core/tests/base",
    "core/tests/checkpoint",
    "workbench/tests/cli",
    "core/tests/models",
    "core/tests/runs",
    "plugins/quark_exporters/tests",
    "plugins/quark_templates/tests",
    "tests/plugins",
    "tests/integration/test_cli_quantize.py",
    "tests/integration/test_export_reload.py",
    "tests/integration/test_readme.py",
    "tests/integration/test_resume.py",
    "tests/integration/test_shared_resume.py",
)
"""The tests of each cell: export, reload, families of models, resuming, several processes, commands."""

PACKAGES = tuple(
    re.search(r"^PACKAGES := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)[1].split()  # type: ignore[index]
)
"""The folders of the distributions."""


@attrs.frozen
class Result:
    """The result of the tests of a cell.

    Attributes:
        commit: Abbreviated commit of the repository.
        versions: The installed version of each package.
        demo: Whether ``quark demo`` ended well.
        passed, failed, skipped: Numbers of tests.
        minutes: Time of the tests.
    """

    commit: str
    versions: dict[str, str]
    demo: bool
    passed: int
    failed: int
    skipped: int
    minutes: float


def read() -> dict[str, Result]:
    """Return the results by names of cells."""
    if not RESULTS.is_file():
        return {}
    return {name: Result(**values) for name, values in json.loads(RESULTS.read_text(encoding="utf-8")).items()}


def write(name: str, result: Result) -> None:
    """Store the result of a cell. It replaces an earlier result of the cell."""
    results = {key: attrs.asdict(value) for key, value in (read() | {name: result}).items()}
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def lowest(requirement: str) -> str:
    """Return the lowest version of a package that quark-core allows, such as ``"2.8"`` for ``"torch"``."""
    project = tomllib.loads((ROOT / "core/pyproject.toml").read_text(encoding="utf-8"))["project"]
    (text,) = (text for text in project["dependencies"] if re.match(rf"{requirement}\b", text))
    match = re.search(r">=([\d.]+)", text)
    assert match is not None, text
    return match[1]
