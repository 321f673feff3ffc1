"""The runner of changes that break the code: what it says of a change is what the tests did, and a tree is afterwards what it was."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "def double(x):\n    return 2 * x\n"


@pytest.fixture(scope="module")
def runner(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("tools/mutants/__main__.py")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project of one function and one test, which knows nothing of negative numbers."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "numbers_of_mine.py").write_text(SOURCE)
    (tmp_path / "test_double.py").write_text("from numbers_of_mine import double\n\ndef test_double():\n    assert double(3) == 6\n")
    return tmp_path


@pytest.mark.parametrize(
    ("old", "new", "verdict", "reason"),
    [
        ("2 * x", "3 * x", "killed", "test_double.py::test_double"),
        ("2 * x", "2 * abs(x)", "survived", "what is wrong"),
        ("4 * x", "3 * x", "stale", "occurs 0 times"),
        ("x", "y", "stale", "occurs 2 times"),
        ("return 2 * x", "return 2 *", "broken", "SyntaxError"),
    ],
)
def test_each_verdict_is_what_the_tests_say_and_the_source_is_given_back(
    runner: ModuleType, tree: Path, old: str, new: str, verdict: str, reason: str
) -> None:
    edit = runner.Edit("src/numbers_of_mine.py", old, new)
    found = runner.outcome(tree, runner.Mutant("one", "what is wrong", ("test_double.py",), (edit,)), whole=False)
    assert found.verdict.value == verdict
    assert reason in found.reason
    assert (tree / "src" / "numbers_of_mine.py").read_text() == SOURCE


def test_nothing_is_changed_in_a_tree_whose_tests_fail(runner: ModuleType, tree: Path) -> None:
    (tree / "test_double.py").write_text("def test_nothing():\n    assert False\n")
    mutant = runner.Mutant("one", "what is wrong", ("test_double.py",), (runner.Edit("src/numbers_of_mine.py", "2", "3"),))
    with pytest.raises(ValueError, match="do not pass in the unchanged tree"):
        runner.run_all(tree, [mutant], whole=False, say=print)


def test_a_copy_has_what_git_does_not_ignore(runner: ModuleType, tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    subprocess.run(["git", "init", "--quiet"], cwd=tree, check=True)
    (tree / ".gitignore").write_text("*.pyc\n")
    (tree / "ignored.pyc").write_text("")
    copy = runner.copy_of_the_tree(tree, tmp_path_factory.mktemp("copy"))
    found = sorted(str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file())
    assert found == [".gitignore", "src/numbers_of_mine.py", "test_double.py"]


def test_the_tables_can_be_read_and_name_files_and_tests_that_exist(runner: ModuleType) -> None:
    mutants = runner.read_tables(sorted((ROOT / "tools" / "mutants").glob("*.toml")))
    assert mutants
    for mutant in mutants:
        for test in mutant.tests:
            path, _, function = test.partition("[")[0].partition("::")
            assert f"def {function}" in (ROOT / path).read_text(encoding="utf-8") if function else (ROOT / path).exists(), test


def test_names_that_are_taken_twice_or_by_nobody_are_refused(runner: ModuleType, tmp_path: Path) -> None:
    entry = '[[mutant]]\nname = "one"\nsays = "x"\ntests = ["t"]\n[[mutant.edits]]\nfile = "f"\nold = "a"\nnew = "b"\n'
    (tmp_path / "table.toml").write_text(entry)
    (one,) = runner.read_tables([tmp_path / "table.toml"])
    with pytest.raises(ValueError, match="starts with 'two'"):
        runner.chosen([one], ["two"])
    assert runner.chosen([one], ["o"]) == [one] == runner.chosen([one], [])
    (tmp_path / "table.toml").write_text(entry * 2)
    with pytest.raises(ValueError, match="two changes are named 'one'"):
        runner.read_tables([tmp_path / "table.toml"])
