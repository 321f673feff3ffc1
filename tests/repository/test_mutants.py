"""The runner of changes that break the code: what it says of a change is what the tests did, and a tree is afterwards what it was."""

from __future__ import annotations

import ast
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tools.mutants import covering_tests, drawn, forks
from tools.mutants.behaviours import CONDITION, KEPT, KINDS, OPTION, ORDER, OTHER_SOURCE, RESTORE, behaviours_of
from tools.mutants.equivalent import equivalent_changes, key
from tools.mutants.operators import Mutation, mutations_of

pytestmark = pytest.mark.thorough

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
    with pytest.raises(ValueError, match="fail in the unchanged tree"):
        runner.run_all(tree, [mutant], whole=False, say=print)


def test_a_copy_has_what_git_does_not_ignore(runner: ModuleType, tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    subprocess.run(["git", "init", "--quiet"], cwd=tree, check=True)
    (tree / ".gitignore").write_text("*.pyc\n")
    (tree / "ignored.pyc").write_text("")
    copy = runner.copy_of_the_tree(tree, tmp_path_factory.mktemp("copy"))
    found = sorted(str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file())
    assert found == [".gitignore", "src/numbers_of_mine.py", "test_double.py"]


def test_every_listed_change_can_be_made_and_its_tests_exist(runner: ModuleType) -> None:
    mutants = runner.read_tables(sorted((ROOT / "tools" / "mutants").glob("*.toml")))
    assert mutants
    assert [stale for mutant in mutants if (stale := runner.stale_edit(ROOT, mutant)) is not None] == []
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


MANY = '''"""A module with 2 words."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os


def clipped(x: int, low: int = 0, *, high: int | None = None) -> int:
    """Return x, at least 1 of them."""
    if high is not None and x > high:
        raise ValueError(f"{x + 1} is above {high}")
    print("clipping", x - 1)
    for _ in range(3):
        x = max(x, low, key=abs)
        break
    return x

def __repr__() -> str:
    return "x" * 2
'''


def changed_lines(source: str) -> set[tuple[str, str]]:
    return {(m.old, m.new) for m in mutations_of("many.py", source)}


def test_what_only_people_read_is_not_changed_and_all_else_is_in_each_way() -> None:
    assert changed_lines(MANY) == {
        ("0", "1"),
        ("high is not None and x > high", "(not (high is not None and x > high))"),
        ("high is not None and x > high", "False"),
        ("high is not None and x > high", "(high is not None or x > high)"),
        ("high is not None", "(high is None)"),
        ("x > high", "(x >= high)"),
        ("x > high", "(x <= high)"),
        ("3", "4"),
        ("3", "2"),
        ("max(x, low, key=abs)", "max(x, low)"),
        ("max", "min"),
        ("break", "continue"),
        ("return x", "return None"),
        ("return x", "return low"),
    }


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = not a", {"a", "(not (not a))"}),
        ("x = a == b", {"(a != b)"}),
        ("x = -1", {"1", "2", "0"}),
        ("x = 0.5", {"1.0"}),
        ("x = True", {"False"}),
        ("x = a - b", {"(a + b)"}),
        ("x = a if b else c", {"(c if b else a)"}),
        ("x.y = 'text'", {"pass"}),
        ("x += y", {"pass", "x -= y"}),
        ("x = [a for a in b if c]", {"(not c)"}),
        ("f(a)", {"pass"}),
        ("warnings.warn(1 + 1)", set()),
        ("x: int", set()),
        ("assert a == 1", set()),
        ("x = isinstance(a, b | c)", set()),
        ("x = f(a, b)", {"f(b, a)"}),
        ("x = max(a, zip(b, strict=True))", {"min"}),
    ],
)
def test_a_statement_is_changed_in_these_ways(source: str, expected: set[str]) -> None:
    assert {new for _, new in changed_lines(source) if not new.startswith("(not (not")} | ({"(not (not a))"} & expected) == expected, (
        changed_lines(source)
    )


BEHAVIOURS = '''
def run(self, a: int, b: int, c: str, *, fast: bool = False) -> int:
    """Return something."""
    if a and b or fast:
        raise ValueError(f"{a or b}")
    with quiet(c):
        self.add(a)
        self.end()
    try:
        del self.memory
    finally:
        self.close()
    return b
'''


def test_changes_of_behaviour_drop_exchange_keep_and_ignore() -> None:
    found = {(m.kind, m.old, m.new) for m in behaviours_of("run.py", BEHAVIOURS)}
    source = {(OTHER_SOURCE, "a", "b"), (OTHER_SOURCE, "b", "a")}
    assert found - source == {
        (CONDITION, "a and b or fast", "(a and b)"),
        (CONDITION, "a and b or fast", "fast"),
        (CONDITION, "a and b", "a"),
        (CONDITION, "a and b", "b"),
        (ORDER, "self.add(a)\n        self.end()", "self.end()\n        self.add(a)"),
        (KEPT, "del self.memory", "pass"),
        (KEPT, "self.close()", "pass"),
        (RESTORE, "self.close()", "pass"),
        (RESTORE, "with quiet(c):\n        self.add(a)\n        self.end()", "if True:\n        self.add(a)\n        self.end()"),
        (OPTION, "", "fast = False\n    "),
    }
    assert source <= found
    lines = {m.line for m in behaviours_of("run.py", BEHAVIOURS) if m.kind == OTHER_SOURCE}
    assert lines == {4, 7, 13}, "what only a message reads is not changed"


def test_kinds_take_turns() -> None:
    drawn_ones = drawn.in_turn([*behaviours_of("run.py", BEHAVIOURS)])
    assert {m.kind for m in drawn_ones[: len(KINDS)]} == set(KINDS)
    assert len(drawn_ones) == len(behaviours_of("run.py", BEHAVIOURS))


@pytest.mark.parametrize("changes_of", drawn.KINDS.values(), ids=drawn.KINDS)
@pytest.mark.parametrize("path", ["core/src/quark/calibration/activation_scales.py"])
def test_each_change_of_a_source_is_other_code_that_can_be_compiled(path: str, changes_of: Callable[[str, str], list[Mutation]]) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    mutations = changes_of(path, source)
    assert len(mutations) > 25
    tree = ast.dump(ast.parse(source))
    for mutation in mutations:
        assert source[mutation.start : mutation.end] == mutation.old
        assert ast.dump(ast.parse(mutation.applied(source))) != tree, mutation


def test_the_same_seed_draws_the_same_changes_one_a_line_whatever_other_files_become(tree: Path) -> None:
    def named(count: int, seed: int, known: set[tuple[str, ...]] = frozenset()) -> list[Mutation]:  # type: ignore[assignment]
        return drawn.drawn(tree, {"one": ["many.py"], "other": ["other.py"]}, count=count, seed=seed, known=known)["one"]

    (tree / "many.py").write_text(MANY)
    (tree / "other.py").write_text("x = 1\n" * 3)
    first = named(6, 0)
    assert len(first) == len({mutation.line for mutation in first}) == 6
    assert named(6, 0) == first
    assert any(named(6, seed) != first for seed in range(1, 4))
    (tree / "other.py").write_text("x = 1\n" * 2)
    assert named(6, 0) == first
    marked = key(tree, first[0])
    assert marked not in {key(tree, mutation) for mutation in named(6, 0, {marked})}


@pytest.mark.slow
def test_a_line_is_known_by_the_tests_that_run_it(tree: Path) -> None:
    path = tree / "src" / "numbers_of_mine.py"
    path.write_text(SOURCE + "\n\ndef half(x):\n    if x:\n        return x / 2\n    return 0\n")
    test = "import pytest\nfrom numbers_of_mine import double, half\n\n"
    test += "@pytest.mark.parametrize('x', [1, 2])\ndef test_double(x):\n    assert double(x) == 2 * x\n\n"
    test += "def test_half():\n    assert half(2) == 1\n\ndef test_fails():\n    assert half(0)\n"
    (tree / "test_double.py").write_text(test)
    ((file, status, _),) = covering_tests.measure_all(["test_double.py"], tree, tree / "cache", drawn.PYTEST, at_once=1)
    assert (file, status) == ("test_double.py", 1)
    record = covering_tests.read_record(covering_tests.record_path(tree / "cache", file))
    assert record is not None
    lines = record.lines["src/numbers_of_mine.py"]
    names = {line: {record.tests[test].name.partition("::")[2] for test in tests} for line, tests in lines.items()}
    assert names == {2: {"test_double[1]", "test_double[2]"}, 6: {"test_half"}, 7: {"test_half"}}
    assert list(covering_tests.measure_all(["test_double.py"], tree, tree / "cache", drawn.PYTEST, at_once=1)) == []
    path.write_text(SOURCE)
    assert not record.is_of(tree, "test_double.py")


@pytest.mark.slow
def test_a_drawn_change_is_noticed_if_a_test_of_its_line_fails_or_time_is_up(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    source = "def double(x):\n    while x < 0:\n        x += 1\n    return 2 * x\n"
    (tree / "src" / "numbers_of_mine.py").write_text(source)
    pristine = Path(shutil.copytree(tree, tmp_path_factory.mktemp("trees") / "pristine"))
    file = "src/numbers_of_mine.py"
    test = covering_tests.Test("test_double.py::test_double", 0.01)
    tests = drawn.Map({"test_double.py": covering_tests.FileRecord("", {}, [test], {file: {2: [0], 4: [0]}}, 0.1)})
    mutations = [m for m in mutations_of(file, source) if m.new in ("3", "pass", "return None")]
    results = {r.mutation.new: r for r in drawn.run({"one": mutations}, tests, pristine, at_once=2)}
    assert {new: result.noticed_by for new, result in results.items()} == {"3": test.name, "return None": test.name, "pass": ""}
    assert {copy.read_text() for copy in pristine.parent.glob(f"*/{file}")} == {source}
    assert drawn.scores(list(results.values())) == {"one": (2, 3)}
    assert "-    return 2 * x\n+    return 3 * x\n" in drawn.diff(tree, results["3"].mutation)


@pytest.mark.posix("a fork")
def test_a_fork_that_takes_too_long_is_ended_and_its_tree_restored(tree: Path) -> None:
    def works_for_ever(_: Path) -> int:
        while True:
            pass

    said: list[str] = []
    jobs = [
        forks.Job("endless", works_for_ever, 0.2, lambda _: said.append("prepared"), lambda _: said.append("restored")),
        forks.Job("three", lambda _: 3, 5),
    ]
    ended = {job.what: status for job, status, _ in forks.run_all(jobs, [tree])}
    assert ended == {"endless": forks.TIMEOUT, "three": 3}
    assert said == ["prepared", "restored"]


def test_marks_of_changes_that_make_no_difference_give_a_reason() -> None:
    marks = equivalent_changes(ROOT / "tools" / "mutants" / "equivalent.toml")
    assert all(len(reason.split()) >= 4 for reason in marks.values())
    assert all((ROOT / file).is_file() for file, *_ in marks)


def test_test_files_mirror_sources_by_name_and_place() -> None:
    source = "core/src/quark/runs/identity.py"
    assert drawn.mirrors("core/tests/runs/test_identity.py", source)
    assert not drawn.mirrors("core/tests/runs/graph/test_identity.py", source)
    assert not drawn.mirrors("plugins/quark_algos/tests/runs/test_identity.py", source)
    assert drawn.mirrors("core/tests/test_quark.py", "core/src/quark/__init__.py")
    assert drawn.mirrors("plugins/quark_algos/tests/gptq/test_gptq.py", "plugins/quark_algos/src/quark_algos/gptq/gptq.py")
