"""Measure which tests run which line, for each test file. The result is stored until the sources change.

Each statement of the sources writes a byte into shared memory when it runs. So statements in greenlets,
threads and forked processes are recorded, and tests are hardly slower. Statements in other subprocesses are
not recorded.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib.machinery
import json
import mmap
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import attrs
import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook

from tools.mutants import forks

SECONDS = 900  # seconds of CPU for one test file
PER_LINE = 6  # most tests of one file that are recorded for a line, of different functions if possible
SIZE = 1 << 20  # most statements that can be counted
HITS = "_statements_that_ran"


@attrs.frozen
class Test:
    """One test, and the time that it takes with its fixtures."""

    name: str
    seconds: float


@attrs.frozen
class FileRecord:
    """The lines that one test file runs. For each line of a source, `lines` has the tests that run it, as
    positions in `tests`."""

    digest: str
    sources: dict[str, str]
    tests: list[Test]
    lines: dict[str, dict[int, list[int]]]
    seconds: float

    def is_of(self, tree: Path, file: str) -> bool:
        """Return whether the test file and all sources that it ran are unchanged."""
        return self.digest == digest(tree / file) and all(digest(tree / path) == old for path, old in self.sources.items())


def digest(path: Path) -> str:
    """Return the digest of a file, or an empty text if the file does not exist."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""


class Statements:
    """Numbers the statements of the sources, and loads modules that record which statements run."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.places: list[tuple[str, int]] = []
        self.codes = {
            str(path): compile(self.noted(path), path, "exec", dont_inherit=True) for root in roots for path in root.rglob("*.py")
        }

    def install(self) -> None:
        """Make this process and its forks import the sources in the form that records statements."""
        self.ran = mmap.mmap(-1, SIZE)
        setattr(builtins, HITS, self.ran)
        original = importlib.machinery.SourceFileLoader.get_code

        def get_code(loader: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
            return self.codes.get(loader.path) or original(loader, name)

        rewriting = AssertionRewritingHook.exec_module

        def exec_module(hook: AssertionRewritingHook, module: ModuleType) -> None:
            assert module.__spec__ is not None
            code = self.codes.get(str(module.__spec__.origin))
            if code is None:
                return rewriting(hook, module)
            hook._rewritten_names[module.__name__] = Path(str(module.__spec__.origin))  # where the hook looks for files beside the module
            exec(code, module.__dict__)

        importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
        AssertionRewritingHook.exec_module = exec_module  # type: ignore[method-assign]  # pytest loads modules of its plugins' distributions

    def noted(self, path: Path) -> ast.Module:
        """Return the syntax tree of a file with a recording statement before each statement."""
        module = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(module):
            for field in ("body", "orelse", "finalbody"):
                body = getattr(node, field, None)
                if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                    setattr(node, field, list(self._with_notes(str(path), body, documented=field == "body")))
        return ast.fix_missing_locations(module)

    def _with_notes(self, path: str, body: list[ast.stmt], *, documented: bool) -> Iterator[ast.stmt]:
        for position, statement in enumerate(body):
            docstring = documented and position == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not docstring and not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
                yield self._note(path, statement)
            yield statement

    def _note(self, path: str, statement: ast.stmt) -> ast.stmt:
        self.places.append((path, statement.lineno))
        target = ast.Subscript(ast.Name(HITS, ast.Load()), ast.Constant(len(self.places) - 1), ast.Store())
        return ast.copy_location(ast.Assign([target], ast.copy_location(ast.Constant(1), statement)), statement)

    def taken(self) -> list[int]:
        """Return the numbers of the statements that ran since the last call."""
        text = self.ran[: len(self.places)]
        self.ran[: len(self.places)] = bytes(len(self.places))
        found, at = [], text.find(1)
        while at >= 0:
            found.append(at)
            at = text.find(1, at + 1)
        return found


class Recorder:
    """A plugin of pytest that records the time and the statements of each test that passes."""

    def __init__(self, statements: Statements) -> None:
        self.statements = statements
        self.tests: list[Test] = []
        self.ran: dict[int, list[int]] = defaultdict(list)
        self.passed = True

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.statements.taken()
        self.passed, begun = True, time.perf_counter()
        yield
        ran = self.statements.taken()
        if self.passed:
            self.tests.append(Test(item.nodeid, round(time.perf_counter() - begun, 4)))
            for number in ran:
                self.ran[number].append(len(self.tests) - 1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed &= report.passed

    def lines(self) -> dict[str, dict[int, list[int]]]:
        """Return the best tests of each line: the quickest tests, from as many test functions as possible."""
        lines: dict[str, dict[int, list[int]]] = defaultdict(dict)
        for number, tests in self.ran.items():
            path, line = self.statements.places[number]
            lines[path][line] = self._best([*tests, *lines[path].get(line, ())])
        return lines

    def _best(self, tests: Sequence[int]) -> list[int]:
        seen: Counter[str] = Counter()
        ranked = []
        for test in sorted(set(tests), key=lambda test: self.tests[test].seconds):
            function = self.tests[test].name.partition("[")[0]
            ranked.append((seen[function], self.tests[test].seconds, test))
            seen[function] += 1
        return [test for _, _, test in sorted(ranked)[:PER_LINE]]


def _measure(tree: Path, file: str, output: Path, statements: Statements, arguments: Sequence[str]) -> int:
    """Run one test file while the sources record their statements, and write the file's record."""
    forks.quiet(output.with_suffix(".log"))
    statements.install()
    recorder, begun = Recorder(statements), time.perf_counter()
    status = pytest.main([*arguments, file], plugins=[recorder])
    inside = {str(Path(path).relative_to(tree)): found for path, found in recorder.lines().items()}
    seconds = time.perf_counter() - begun
    record = FileRecord(digest(tree / file), {path: digest(tree / path) for path in inside}, recorder.tests, inside, seconds)
    output.write_text(json.dumps(attrs.asdict(record)))
    return int(status)


def read_record(path: Path) -> FileRecord | None:
    """Return the stored record of a test file; None if nothing is stored."""
    if not path.is_file():
        return None
    data: dict[str, Any] = json.loads(path.read_text())
    lines = {source: {int(line): tests for line, tests in found.items()} for source, found in data["lines"].items()}
    return FileRecord(data["digest"], data["sources"], [Test(**test) for test in data["tests"]], lines, data["seconds"])


def record_path(cache: Path, file: str) -> Path:
    """Return the path of a test file's record."""
    return cache / (file.removesuffix(".py").replace("/", ".") + ".json")


def measure_all(
    files: Sequence[str], tree: Path, cache: Path, arguments: Sequence[str], *, at_once: int
) -> Iterator[tuple[str, int, float]]:
    """Measure the test files that have no current record. For each of them, yield the file, pytest's exit
    status and the time in seconds."""
    cache.mkdir(parents=True, exist_ok=True)
    stale = []
    for file in files:
        if (record := read_record(record_path(cache, file))) is None or not record.is_of(tree, file):
            stale.append(file)
    if not stale:
        return
    statements = Statements([Path(folder) for folder in forks.source_folders(tree)[1:]])
    jobs = (
        forks.Job(file, partial(_measure, file=file, output=record_path(cache, file), statements=statements, arguments=arguments), SECONDS)
        for file in stale
    )
    for job, status, seconds in forks.run_all(jobs, [tree] * at_once):
        yield job.what, status, seconds
