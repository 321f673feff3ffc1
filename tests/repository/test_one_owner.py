"""Claims of ARCHITECTURE.md that concern many files.

Results that a model carries are for users, what looks at runs stands above them, and files of checkpoints are read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from quark.calibration.transform_validation import BlockSource
from quark.runs.sink import BlockSink

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "src" / "quark"
RESULTS = {"quark_plan", "quark_report"}
OF_RUNS = [CORE / name for name in ("runs", "calibration", "algorithms", "models/plan")]
OF_PLUGINS = [ROOT / "plugins" / name / "src" for name in ("quark_algos", "quark_exporters")]


def read_results(source: str) -> Iterator[int]:
    """The lines at which an attribute is read that a run leaves on a model for users."""
    for node in ast.walk(ast.parse(source)):
        is_read = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in RESULTS
        is_got = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr"
        named = is_got and any(isinstance(a, ast.Constant) and a.value in RESULTS for a in node.args)  # type: ignore[attr-defined]
        if is_read or named:
            yield node.lineno  # type: ignore[attr-defined]


@pytest.mark.parametrize("folder", [*OF_RUNS, *OF_PLUGINS], ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_in_a_run_reads_the_results_that_a_model_carries_for_users(folder: Path) -> None:
    files = sorted(folder.rglob("*.py"))
    assert files
    lines = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in read_results(path.read_text(encoding="utf-8"))]
    assert lines == []


@pytest.mark.parametrize("source", ["model.quark_report.seconds", "x = content.model.quark_plan", "getattr(model, 'quark_report', None)"])
def test_read_results_finds_an_attribute_that_is_read(source: str) -> None:
    assert list(read_results(source)) == [1]


def test_read_results_leaves_out_an_attribute_that_is_set() -> None:
    assert list(read_results("model.quark_report = report")) == []


def test_the_story_of_one_run_calls_sources_and_sinks_by_methods_that_they_have() -> None:
    story = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("## One run")[2].split("```")[1]
    calls = re.findall(r"\b(sink|source)\.(\w+)", story)
    assert len(calls) >= 3
    assert [f"{owner}.{name}" for owner, name in calls if not hasattr({"sink": BlockSink, "source": BlockSource}[owner], name)] == []


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


@pytest.mark.parametrize("above", ["quark_workbench.report", "quark_workbench.evaluate"])
def test_no_module_of_runs_imports_what_looks_at_runs_from_above(above: str) -> None:
    modules = {path.name: set(imported(path)) for path in (CORE / "runs").rglob("*.py")}
    assert "run.py" in modules
    assert [name for name, names in modules.items() if any(n == above or n.startswith(f"{above}.") for n in names)] == []


MAPPING = {"from_file", "load_file", "memmap", "mmap", "open_memmap", "safe_open"}
"""What maps a file, or can."""
MAPS_NOTHING_OF_OTHERS = {
    "core/src/quark/models/hf/shards.py": "it reads headers",
    "core/src/quark/base/files.py": "it releases pages",
    "core/src/quark/calibration/spilled_inputs.py": "its file has no name",
}


def mapping(source: str) -> Iterator[str]:
    """What a module names that maps a file, but for files that safetensors reads."""
    for node in ast.walk(ast.parse(source)):
        called = node.func if isinstance(node, ast.Call) else None
        name = called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else None
        reads = isinstance(node, ast.Call) and any(k.arg == "backend" and ast.unparse(k.value) == "'pread'" for k in node.keywords)
        if name in MAPPING and not reads:
            yield name
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name == "mmap")


@pytest.mark.parametrize("folder", ["core", "plugins", "workbench", "devkit", "tiny_model"])
def test_no_file_of_a_checkpoint_is_mapped(folder: str) -> None:
    files = [path for path in sorted((ROOT / folder).rglob("*.py")) if "src" in path.relative_to(ROOT).parts]
    assert files
    named = {path.relative_to(ROOT).as_posix(): sorted(set(mapping(path.read_text(encoding="utf-8")))) for path in files}
    assert {path: names for path, names in named.items() if names and path not in MAPS_NOTHING_OF_OTHERS} == {}


@pytest.mark.parametrize(
    "source", ["safe_open(path, 'pt')", "numpy.memmap(path)", "import mmap", "torch.from_file(path)", "safe_open(path, backend=b)"]
)
def test_mapping_finds_what_maps_a_file(source: str) -> None:
    assert len(list(mapping(source))) == 1


def test_mapping_leaves_out_a_file_that_is_read() -> None:
    assert list(mapping("safe_open(path, 'pt', backend='pread')")) == []
