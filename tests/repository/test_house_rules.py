"""Rules of this repository that no linter knows."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from quark.base.version import TRANSFORMERS

ROOT = Path(__file__).resolve().parents[2]
# The distributions of this repository, by folder.
DISTRIBUTIONS = [
    "core",
    *sorted(f"plugins/{p.parent.name}" for p in ROOT.glob("plugins/*/pyproject.toml")),
    "workbench",
    "tiny_model",
    "devkit",
]
SOURCES = sorted(p for d in DISTRIBUTIONS for p in (ROOT / d / "src").rglob("*.py"))
TEXTS = sorted(p for p in ROOT.rglob("*.py") if not any(part == "build" or part.startswith(".") for part in p.relative_to(ROOT).parts))


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_is_something_to_check() -> None:
    assert len(SOURCES) > 50


def test_no_file_is_longer_than_400_lines() -> None:
    lengths = {named(path): len(path.read_text(encoding="utf-8").splitlines()) for path in TEXTS}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_no_function_is_longer_than_60_lines() -> None:
    long = [f"{named(path)}: {name}" for path in SOURCES for name in long_functions(path.read_text(encoding="utf-8"))]
    assert long == []


def long_functions(source: str) -> list[str]:
    """Return the names of the functions of more than 60 lines, docstrings apart."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [n.name for n in functions if _lines(n) - (_lines(n.body[0]) if ast.get_docstring(n) else 0) > 60]


def _lines(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_a_function_of_61_lines_is_long() -> None:
    assert long_functions("def f():\n" + "    x = 1\n" * 59) == []
    assert long_functions('def f():\n    """Say.\n\n    More.\n    """\n' + "    x = 1\n" * 59) == []
    assert long_functions("class C:\n    def f(self):\n" + "        x = 1\n" * 60) == ["f"]


def test_a_source_file_says_what_it_is() -> None:
    without_docstring = [named(path) for path in SOURCES if not path.read_text(encoding="utf-8").startswith('"""')]
    assert without_docstring == [], "the first line is a docstring"
    without_name = [named(path) for path in SOURCES if path.stem in {"utils", "util", "helpers", "misc"}]
    assert without_name == []


def test_all_distributions_have_the_one_version() -> None:
    from quark.base.version import VERSION

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


def test_the_range_of_transformers_that_is_checked_is_the_one_that_is_declared() -> None:
    project = tomllib.loads((ROOT / "core/pyproject.toml").read_text())["project"]
    declared = next(r for r in map(Requirement, project["dependencies"]) if r.name == "transformers")
    assert declared.specifier == SpecifierSet(TRANSFORMERS)


_OF_A_VERSION = re.compile(
    r"""transformers\.__version__|(version|installed)\(\s*["']transformers["']|hasattr\(\s*(transformers|quantizer_quark|core_model_loading)\b"""
    r"""|is_transformers_version|from transformers import .*__version__"""
)


def test_one_module_asks_for_the_version_of_transformers() -> None:
    asking = {named(path) for path in SOURCES if _OF_A_VERSION.search(path.read_text(encoding="utf-8"))}
    assert asking == {"core/src/quark/base/version.py"}


def test_each_distribution_is_installed_checked_and_tested_by_the_tools_of_the_repository() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    packages = {p.name for d in DISTRIBUTIONS for p in (ROOT / d / "src").iterdir() if (p / "__init__.py").is_file()}
    assert set(makefile.partition("PACKAGES := ")[2].partition("\n")[0].split()) == set(DISTRIBUTIONS)
    assert {Path(path).name for path in tools["mypy"]["files"]} >= packages
    assert set(tools["ruff"]["lint"]["isort"]["known-first-party"]) >= packages
    assert set(tools["importlinter"]["root_packages"]) == packages
    tested = [ROOT / path for path in tools["pytest"]["ini_options"]["testpaths"]]
    assert all(any((ROOT / d / "tests").is_relative_to(path) for path in tested) for d in DISTRIBUTIONS)


def test_each_distribution_carries_the_licence() -> None:
    for distribution in DISTRIBUTIONS:
        assert (ROOT / distribution / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes(), distribution


def test_each_distribution_is_typed_and_has_its_own_readme_and_tests() -> None:
    for distribution in DISTRIBUTIONS:
        assert (ROOT / distribution / "README.md").is_file(), distribution
        assert list((ROOT / distribution / "src").rglob("py.typed")), distribution
        assert list((ROOT / distribution / "tests").rglob("test_*.py")), distribution


def registered(kind: str) -> set[str]:
    """Names of the records of the installed plugins."""
    import quark

    return set(getattr(quark, kind)().names())


# Number formats share names with schemes (int8): the torch-free vocabulary lists those.
NAMES_ALLOWED_IN = {"core/src/quark/config/enums.py"}


def test_core_knows_no_scheme_algorithm_or_model_by_name() -> None:
    names = registered("schemes") | registered("algorithms") | registered("templates")
    found = set()
    for path in (p for p in SOURCES if p.is_relative_to(ROOT / "core/src")):
        file = str(path.relative_to(ROOT))
        found |= {(file, name) for name in quoted(path) & names if file not in NAMES_ALLOWED_IN}
    assert found == set()


def quoted(path: Path) -> set[str]:
    """All string constants of a module but docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    return {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in documents}


def test_quoted_strings_are_those_of_code_and_not_of_docstrings(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""gptq"""\nX = ("awq", f"{1}int4")  # "fp8"\ndef f():\n    """mx6"""\n')
    assert quoted(tmp_path / "a.py") == {"awq", "int4"}


def test_no_code_is_evaluated_and_nothing_is_pickled() -> None:
    forbidden = re.compile(r"(?<![\w.])(eval|exec)\(|\bpickle\b|torch\.load\(")
    # Ranks exchange values with each other alone, and what a message may name is limited.
    others = [p for p in SOURCES if p != ROOT / "core/src/quark/base/ranks.py"]
    found = [f"{p.relative_to(ROOT)}: {m.group()}" for p in others for m in forbidden.finditer(p.read_text(encoding="utf-8"))]
    assert not found


@pytest.mark.parametrize("module", ["quark", "quark.config.model", "quark.plugins", "quark.config.templates", "quark_workbench.cli.main"])
def test_light_modules_import_neither_torch_nor_transformers(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_names_of_snippets_come_without_transformers() -> None:
    code = "import sys; from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
