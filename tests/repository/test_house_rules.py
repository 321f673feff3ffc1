"""Rules of this repository that no linter knows."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = ["core", *(f"plugins/quark_{part}" for part in ("schemes", "algos", "templates", "exporters"))]
SOURCES = sorted(p for d in DISTRIBUTIONS for p in (ROOT / d / "src").rglob("*.py"))
TEXTS = sorted(p for p in ROOT.rglob("*.py") if not {".venv", "build"} & set(p.relative_to(ROOT).parts))


def test_there_is_something_to_check() -> None:
    assert len(SOURCES) > 50


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_is_longer_than_400_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_function_is_longer_than_60_lines(path: Path) -> None:
    functions = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.FunctionDef)]
    assert [n.name for n in functions if n.end_lineno is None or n.end_lineno - n.lineno >= 60] == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_source_file_says_what_it_is(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith('"""'), "the first line is a docstring"
    assert path.stem not in {"utils", "util", "helpers", "misc"}


def test_all_distributions_have_the_one_version() -> None:
    from quark.version import VERSION

    for distribution in DISTRIBUTIONS:
        project = tomllib.loads((ROOT / distribution / "pyproject.toml").read_text())["project"]
        assert project["version"] == VERSION, distribution
        pins = [d for d in project["dependencies"] if d.startswith("quark-")]
        assert all(pin.endswith(f"=={VERSION}") for pin in pins), distribution


def test_the_lowest_versions_that_are_tested_are_those_that_are_allowed() -> None:
    project = tomllib.loads((ROOT / "core/pyproject.toml").read_text())["project"]
    allowed = {(r := Requirement(line)).name: {s.version for s in r.specifier if s.operator == ">="} for line in project["dependencies"]}
    pins = [Requirement(line) for line in (ROOT / "constraints-lowest.txt").read_text().splitlines() if line and not line.startswith("#")]
    tested = {r.name: {str(s).removeprefix("==") for s in r.specifier} for r in pins if r.name in allowed}
    assert allowed.keys() == tested.keys()
    for name, floor in allowed.items():
        assert {Version(v) for v in floor} == {Version(v) for v in tested[name]}, name


def test_what_uses_private_interfaces_of_a_dependency_is_bounded_above() -> None:
    project = tomllib.loads((ROOT / "core/pyproject.toml").read_text())["project"]
    requirements = [Requirement(line) for line in project["dependencies"]]
    bounded = {r.name for r in requirements if any(s.operator == "<" for s in r.specifier)}
    assert {"torch", "transformers"} <= bounded


def test_each_distribution_carries_the_licence() -> None:
    for distribution in DISTRIBUTIONS:
        assert (ROOT / distribution / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes(), distribution


def test_each_distribution_is_typed_and_has_its_own_readme_and_tests() -> None:
    for distribution in DISTRIBUTIONS:
        assert (ROOT / distribution / "README.md").is_file(), distribution
        assert list((ROOT / distribution / "src").rglob("py.typed")), distribution
        assert list((ROOT / distribution / "tests").rglob("test_*.py")), distribution


def registered(kind: str) -> set[str]:
    """Names of what plugins register, apart from plain words that English and torch use too."""
    import quark

    return set(getattr(quark, kind)().names())


def test_core_knows_no_scheme_algorithm_or_model_by_name() -> None:
    # Number formats share names with schemes (int8); the torch-free vocabulary documents those, and the bundled tiny model is a llama.
    allowed = {"core/src/quark/config/enums.py"}
    names = (registered("schemes") | registered("algorithms") | registered("templates")) - {"rotation"}
    quoted = re.compile(r"""["']({})["']""".format("|".join(map(re.escape, sorted(names)))))
    found = []
    for path in (p for p in SOURCES if p.is_relative_to(ROOT / "core/src") and "testing" not in p.parts):
        if str(path.relative_to(ROOT)) in allowed:
            continue
        code = re.sub(r'""".*?"""', "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        code = re.sub(r"(?m)#.*$", "", code)
        found += [f"{path.relative_to(ROOT)}: {m.group()}" for m in quoted.finditer(code)]
    assert not found


def test_no_code_is_evaluated_and_nothing_is_pickled() -> None:
    forbidden = re.compile(r"(?<![\w.])(eval|exec)\(|\bpickle\b|torch\.load\(")
    found = [f"{p.relative_to(ROOT)}: {m.group()}" for p in SOURCES for m in forbidden.finditer(p.read_text(encoding="utf-8"))]
    assert not found


@pytest.mark.parametrize("module", ["quark", "quark.config.model", "quark.plugins", "quark.templates", "quark.cli.main"])
def test_light_modules_import_neither_torch_nor_transformers(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
