"""The layout: the files that CONTRIBUTING.md names answer its questions, and tests lie where their sources do."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
QUESTIONS = re.findall(r"^\| ([^|]+\?) \| \[[^\]]*\]\(([^)]+)\) \| `([^`|]+)` \|$", CONTRIBUTING, flags=re.MULTILINE)


def definitions(path: Path) -> set[str]:
    """Names of a module's functions, classes and constants, and of methods and fields as ``Class.name``."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names |= set(_names(node))
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for member in node.body for name in _names(member)}
    return names


def _names(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case _:
            return []


def test_there_are_twenty_questions_and_every_row_of_their_table_is_one() -> None:
    table = CONTRIBUTING.partition("| question |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) == len(QUESTIONS) >= 20


def test_the_file_that_answers_a_question_defines_what_it_names() -> None:
    missing = [f"{question} {file} does not exist" for question, file, _ in QUESTIONS if not (ROOT / file).is_file()]
    assert missing == []
    undefined = [f"{question} {file} does not define {name}" for question, file, name in QUESTIONS if name not in definitions(ROOT / file)]
    assert undefined == []


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", "CONTRIBUTING.md", "core/README.md"])
def test_files_and_folders_that_documents_name_exist(document: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / document).read_text(encoding="utf-8"), flags=re.DOTALL)
    bases = (
        ROOT,
        ROOT / "core/src/quark",
        ROOT / "plugins",
        ROOT / "plugins/quark_algos/src/quark_algos",
        ROOT / "workbench/src/quark_workbench",
        (ROOT / document).parent,
    )
    paths = {path for path in re.findall(r"`((?:[\w.-]+/)+(?:[\w-]+\.\w+)?)`", text) if "…" not in path}
    assert paths
    assert sorted(path for path in paths if not any((base / path).exists() for base in bases)) == []


@pytest.mark.parametrize(
    ("source", "tests"), [("core/src/quark", "core/tests"), ("plugins/quark_algos/src/quark_algos", "plugins/quark_algos/tests")]
)
def test_each_folder_of_sources_has_a_folder_of_tests_of_the_same_name(source: str, tests: str) -> None:
    def folders(path: Path) -> set[str]:
        return {p.name for p in path.iterdir() if p.is_dir() and any(p.rglob("*.py"))}

    assert folders(ROOT / source) == folders(ROOT / tests)


def test_definitions_are_functions_classes_constants_and_members(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("A = 1\nB: int = 2\ndef f(): pass\nclass C:\n    x: int\n    def g(self): pass\n")
    assert definitions(tmp_path / "a.py") == {"A", "B", "f", "C", "C.x", "C.g"}
