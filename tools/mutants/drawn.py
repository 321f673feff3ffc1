"""Break the code by random changes, and run the tests of each changed line.

    python -m tools.mutants.drawn                # 400 changes, over all packages; the score of each
    python -m tools.mutants.drawn --packages core/runs --count 60 --seed 1
    python -m tools.mutants.drawn --again        # only the last run's survivors

A package is a folder directly under the sources of the core, or a plugin distribution. The modules directly
in ``core/src/quark`` are a package too. Each package gets changes in proportion to its lines, and at least a
few. The same seed draws the same changes in a file, even if other files change. ``--kind`` chooses changes of
single operators, or changes of behaviour (`behaviours.py`), whose kinds take turns.

First the program measures which tests run a line, for each test file. It keeps the result in `.mutants/`
until a test or its sources change. Then it runs, for each change, the tests of the mirrored test file, and
after these the other tests of the changed line, the quickest first. The tests *notice* the change if a test
fails or takes too long. Otherwise the change *survived*, and the program writes it to
`.mutants/survivors.diff`. `equivalent.toml` lists changes that make no difference, with the reason; the
program does not draw them. The exit status is 0 if every package reaches the wanted score.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path

import attrs
import pytest

from tools.mutants import forks
from tools.mutants.__main__ import HERE, ROOT, copy_of_the_tree
from tools.mutants.behaviours import behaviours_of
from tools.mutants.covering_tests import FileRecord, measure_all, read_record, record_path
from tools.mutants.equivalent import changed_lines, equivalent_changes, key, skipped, stale_marks
from tools.mutants.operators import Mutation, mutations_of, one_of_each_line

CACHE = ROOT / ".mutants"
SCORE = 0.85  # share of the changes that a package's tests must notice
LEAST = 6  # least number of changes of a package
WHOLE, NEAR = 30.0, 15.0  # longest seconds of a mirrored or a neighbouring test file that runs whole
OTHERS = 8.0  # seconds for tests of other files
AT_IMPORT = 240.0  # seconds for tests of the distribution if the line runs at import
MOST, FEW = 80, 12  # tests of other folders; tests of the first round without nearer tests
SECONDS = 300  # seconds to compile
PYTEST = (
    "-q",
    "-p",
    "no:cacheprovider",
    "--no-header",
    "--tb=line",
    "-W",
    "ignore:Module already imported:pytest.PytestAssertRewriteWarning",
)
KINDS: dict[str, Callable[[str, str], list[Mutation]]] = {"operators": mutations_of, "behaviours": behaviours_of}
NOTHING_RAN = {4, 5}  # statuses of pytest if a test was renamed or removed


@attrs.frozen
class Result:
    """The verdict on one drawn change: the name of the test that failed, or an empty text if none failed."""

    package: str
    mutation: Mutation
    noticed_by: str
    seconds: float
    tests: int

    @property
    def noticed(self) -> bool:
        return bool(self.noticed_by)


def packages_of(tree: Path) -> dict[str, list[str]]:
    """Return the source files of each package, by the name of the package."""
    packages: dict[str, list[str]] = defaultdict(list)
    for path in sorted([*tree.glob("*/src/**/*.py"), *tree.glob("plugins/*/src/**/*.py")]):
        file = path.relative_to(tree)
        loose = file.parts[0] != "core" or len(file.parts) == 4
        name = file.parts[1] if file.parts[0] == "plugins" else file.parts[0] if loose else f"core/{file.parts[3]}"
        packages[name].append(str(file))
    return packages


def drawn(
    tree: Path,
    files: dict[str, list[str]],
    *,
    count: int,
    seed: int,
    known: set[tuple[str, ...]],
    changes_of: Callable[[str, str], Sequence[Mutation]] = mutations_of,
) -> dict[str, list[Mutation]]:
    """Return the changes to try in each package: its share of `count`, but at least `LEAST`. Changes in
    `known` are left out.

    Kinds take turns, so a rare kind is drawn as often as a common one, until its changes are used up.
    """
    whole, numbers = skipped(HERE / "equivalent.toml")
    marked = {file for file, *_ in known}

    def is_drawn(mutation: Mutation) -> bool:
        if mutation.file in numbers and re.fullmatch(r"[\d._]+", mutation.old):
            return False
        return mutation.file not in marked or key(tree, mutation) not in known

    pools: dict[str, list[Mutation]] = {}
    for package, paths in files.items():
        sources = {path: (tree / path).read_text(encoding="utf-8") for path in paths if path not in whole}
        every = (mutation for path, source in sources.items() for mutation in changes_of(path, source))
        pools[package] = in_turn(one_of_each_line(list(filter(is_drawn, every)), seed))
    lines = sum(map(len, pools.values()))
    return {package: pool[: max(LEAST, round(count * len(pool) / lines))] for package, pool in pools.items() if pool}


def in_turn(mutations: Sequence[Mutation]) -> list[Mutation]:
    """Return the mutations in an order in which kinds take turns. The order within a kind stays the same."""
    kinds: dict[str, list[Mutation]] = defaultdict(list)
    for mutation in mutations:
        kinds[mutation.kind].append(mutation)
    return [one for some in zip_longest(*(kinds[kind] for kind in sorted(kinds))) for one in some if one is not None]


@attrs.frozen
class Map:
    """The records of test files, by path."""

    records: dict[str, FileRecord]

    @classmethod
    def read(cls, cache: Path, files: Sequence[str]) -> Map:
        """Return the stored records of these test files."""
        records = {file: read_record(record_path(cache, file)) for file in files}
        return cls({file: record for file, record in records.items() if record is not None})

    def tests_of(self, mutation: Mutation, tree: Path = ROOT) -> tuple[list[list[str]], float]:
        """Return the tests for a change, in up to two rounds, and the total time of these tests in seconds.

        The first round has the tests of the mirrored file and of the same folder that run the line. The
        second round has the other tests of these files, and the quickest tests of other folders. ``tree`` has
        the sources.
        """
        near, whole, far = [], [], []
        ran_at_all = {line for record in self.records.values() for line in record.lines.get(mutation.file, ())}
        statement = max((line for line in ran_at_all if mutation.line - 60 < line <= mutation.line), default=0)  # may span several lines
        runs_at_import = not _is_in_a_function(mutation, tree)
        for file, record in self.records.items():
            ran = record.lines.get(mutation.file, {})
            ran_it = set(ran.get(statement, ()))
            if ran and runs_at_import and _distribution(file) == _distribution(mutation.file):
                ran_it = set(range(len(record.tests)))  # the first test runs code at import, but any test may check its effect
            tests = sorted((record.tests[test] for test in ran_it), key=lambda test: test.seconds)
            seconds = sum(test.seconds for test in record.tests)
            is_mirrored = mirrors(file, mutation.file)
            if is_mirrored or (tests and not runs_at_import and _folder(file) == _folder(mutation.file)):
                near += tests
                # A fixture may run the line only for the first test of a file, while other tests check the
                # fixture's result.
                whole += record.tests if seconds < (WHOLE if is_mirrored else NEAR) else []
            else:
                far.append(tests)
        in_turn = [test for tests in zip_longest(*far) for test in sorted(filter(None, tests), key=lambda test: test.seconds)]
        others, budget = [], AT_IMPORT if runs_at_import else OTHERS
        for test in in_turn if runs_at_import else in_turn[:MOST]:
            if test.seconds <= budget:
                others.append(test)
                budget -= test.seconds
        rounds = [near, [*whole, *others]] if near or whole else [others[:FEW], others[FEW:]]
        seconds = sum(test.seconds for tests in rounds for test in tests)
        return [[test.name for test in tests] for tests in rounds if tests], seconds


def _is_in_a_function(mutation: Mutation, tree: Path) -> bool:
    """Return whether a change is in the body of a function, and not directly in a module or a class."""
    nodes = ast.walk(ast.parse((tree / mutation.file).read_text(encoding="utf-8")))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return any(node.body[0].lineno <= mutation.line <= (node.end_lineno or 0) for node in functions)


def mirrors(test: str, source: str) -> bool:
    """Return whether the path of a test file mirrors the path of a source or of the source's folder."""
    if _distribution(test) != _distribution(source):
        return False
    path, name = Path(source), Path(test).stem.removeprefix("test_")
    _, package, *rest = path.parts[path.parts.index("src") :]
    inside = Path(*rest)
    folder = Path(*Path(test).parts[Path(test).parts.index("tests") + 1 : -1])
    is_of_folder = folder == inside.parent.parent and name == (inside.parent.name or package)
    return is_of_folder or (folder == inside.parent and name == path.stem.lstrip("_"))


def _distribution(file: str) -> str:
    parts = Path(file).parts
    return parts[1] if parts[0] == "plugins" else parts[0]


def _folder(file: str) -> tuple[str, str]:
    return _distribution(file), Path(file).parent.name


class _FirstFailure:
    """A plugin of pytest that records the first failing test."""

    name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.name:
            self.name = f"{report.nodeid} (not collected)"


def _run_tests(tree: Path, rounds: Sequence[Sequence[str]], output: Path) -> int:
    """Run the tests of a change, round by round, until a test fails. Write the name of this test to
    ``output``."""
    forks.quiet(output.with_suffix(".log"))
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    failure = _FirstFailure()
    arguments = ["-x", f"--basetemp={tree}/.tmp", *PYTEST]
    for tests in rounds:
        status = int(pytest.main([*arguments, *tests], plugins=[failure]))
        if status in NOTHING_RAN and not failure.name:  # the change renamed parametrized tests: run whole functions
            status = int(pytest.main([*arguments, *dict.fromkeys(test.partition("[")[0] for test in tests)], plugins=[failure]))
        if failure.name or status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            output.write_text(failure.name)
            return int(pytest.ExitCode.TESTS_FAILED)
    return 0


def _write(tree: Path, mutation: Mutation) -> None:
    path = tree / mutation.file
    path.write_text(mutation.applied(path.read_text(encoding="utf-8")), encoding="utf-8")


def _restore(tree: Path, mutation: Mutation, source: Path) -> None:
    stat = (source / mutation.file).stat()
    (tree / mutation.file).write_bytes((source / mutation.file).read_bytes())
    os.utime(tree / mutation.file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def _compile(tree: Path, tests: Sequence[str]) -> int:
    """Collect the tests once, so that Python and pytest store the compiled sources and tests."""
    forks.quiet(tree.parent / "compiled.log")
    return int(pytest.main(["--collect-only", *PYTEST, *tests]))


def run(mutations: dict[str, list[Mutation]], tests: Map, pristine: Path, *, at_once: int) -> Iterator[Result]:
    """Run the tests of each change in copies of `pristine`, several changes at once. Yield a `Result` for
    each change."""
    outputs = pristine.parent / "outputs"
    outputs.mkdir()
    jobs: list[forks.Job] = []
    for package, drawn_ones in mutations.items():
        for mutation in drawn_ones:
            rounds, seconds = tests.tests_of(mutation, pristine)
            if not rounds:
                yield Result(package, mutation, "", 0.0, 0)
                continue
            output = outputs / f"{len(jobs)}.txt"
            job = forks.Job(
                (package, mutation, output, sum(map(len, rounds))),
                partial(_run_tests, rounds=rounds, output=output),
                20 + 2 * seconds,
                partial(_write, mutation=mutation),
                partial(_restore, mutation=mutation, source=pristine),
            )
            jobs.append(job)
    files = {test.partition("::")[0] for job in jobs for tests in job.run.keywords["rounds"] for test in tests}
    list(forks.run_all([forks.Job(None, partial(_compile, tests=sorted(files)), SECONDS)], [pristine]))
    trees = [Path(shutil.copytree(pristine, pristine.parent / str(number))) for number in range(at_once)]
    for job, status, seconds in forks.run_all(jobs, trees):
        package, mutation, output, number = job.what
        by = "time" if status == forks.TIMEOUT else "" if status == 0 else (output.is_file() and output.read_text()) or f"status {status}"
        yield Result(package, mutation, by, seconds, number)


def diff(tree: Path, mutation: Mutation) -> str:
    """Return a change as a unified diff."""
    source = (tree / mutation.file).read_text(encoding="utf-8")
    names = f"a/{mutation.file}", f"b/{mutation.file}"
    lines = difflib.unified_diff(source.splitlines(keepends=True), mutation.applied(source).splitlines(keepends=True), *names, n=1)
    return "".join(lines)


def scores(results: Sequence[Result], of: Callable[[Result], str] = lambda result: result.package) -> dict[str, tuple[int, int]]:
    """Return, for each package, the number of noticed changes and the number of all changes."""
    tried, noticed = Counter(map(of, results)), Counter(of(result) for result in results if result.noticed)
    return {name: (noticed[name], tried[name]) for name in sorted(tried)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutants.drawn", description="break the code at random, and report which changes the tests notice"
    )
    parser.add_argument("--count", type=int, default=400, help="number of changes over all packages (400); small packages get a few more")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choice of changes (0)")
    parser.add_argument("--kind", choices=KINDS, default="operators", help="kind of changes: operators or behaviours (operators)")
    parser.add_argument("--packages", nargs="*", default=(), metavar="NAME", help="only these packages, such as core/runs or quark_algos")
    parser.add_argument("--at-once", type=int, default=os.cpu_count(), help="number of changes tried at the same time (one for each core)")
    parser.add_argument("--again", action="store_true", help="only the survivors of the last run whose code is unchanged")
    parser.add_argument(
        "--tests", nargs="*", metavar="PATH", help="folders and files of tests to measure (default: every distribution's, and tests/)"
    )
    parser.add_argument("--keep-map", action="store_true", help="use the stored measurement even if tests have changed")
    parser.add_argument("--json", type=Path, help="file for the results, each with its change")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        return _run(options, copy_of_the_tree(ROOT, Path(directory).resolve() / "pristine"))


def _run(options: argparse.Namespace, pristine: Path) -> int:
    """Draw changes, measure tests and run them in a copy of the tree."""
    files = packages_of(pristine)
    if unknown := set(options.packages) - set(files):
        raise ValueError(f"no package is named {sorted(unknown)[0]!r}; there are: {', '.join(files)}")
    marks = equivalent_changes(HERE / "equivalent.toml")
    changes_of = KINDS[options.kind]
    mutations = drawn(pristine, files, count=options.count, seed=options.seed, known=set(marks), changes_of=changes_of)
    for stale in stale_marks(pristine, set(marks)):
        print(f"equivalent.toml names a change that no longer exists: {stale}. Remove its entry")
    if options.packages:
        mutations = {package: mutations[package] for package in options.packages}
    if options.again:
        left = {tuple(one) for one in json.loads((CACHE / "survivors.json").read_text())}
        mutations = {package: [one for one in found if key(pristine, one) in left] for package, found in mutations.items()}
    forks.preload()
    tests = test_files(pristine, options.tests)
    if not options.keep_map:
        for file, status, seconds in measure_all(tests, pristine, CACHE / "tests", PYTEST, at_once=options.at_once):
            print(f"measured  {seconds:5.0f} s  {file}" + (f" (pytest ends with {status})" if status else ""), flush=True)
    results = []
    for result in run(mutations, Map.read(CACHE / "tests", tests), pristine, at_once=options.at_once):
        results.append(result)
        before, after = changed_lines(pristine, result.mutation)
        place = f"{result.mutation.file}:{result.mutation.line}"
        verdict, by = ("noticed", result.noticed_by) if result.noticed else ("SURVIVED", f"{result.tests} tests")
        kind = "" if result.mutation.kind == "operator" else f"{result.mutation.kind}: "
        print(f"{verdict:8} {result.seconds:4.0f} s  {place}  {kind}{before}  ->  {after}  [{by}]", flush=True)
    return report(pristine, results, options.json)


def test_files(tree: Path, paths: Sequence[str] | None) -> list[str]:
    """Return the test files under `paths`; by default, all test files that may run a source.

    Tests of other programs are left out, since they run no source.
    """
    distributions = sorted([*tree.glob("*/tests"), *tree.glob("plugins/*/tests")])
    roots = paths or [*(str(path.relative_to(tree)) for path in distributions), "tests"]
    found = [path for root in roots for path in ([tree / root] if (tree / root).is_file() else sorted((tree / root).rglob("test_*.py")))]
    names = [str(path.relative_to(tree)) for path in found]
    return [name for name in names if not re.match(r"tests/(browser|clients|repository)/", name)]


def report(tree: Path, results: Sequence[Result], output: Path | None) -> int:
    """Write the survivors, print the score of each package, and return the exit status."""
    left = [result.mutation for result in results if not result.noticed]
    CACHE.mkdir(exist_ok=True)
    (CACHE / "survivors.diff").write_text("".join(diff(tree, mutation) for mutation in left), encoding="utf-8")
    (CACHE / "survivors.json").write_text(json.dumps([key(tree, mutation) for mutation in left]))
    if output is not None:
        output.write_text(json.dumps([attrs.asdict(result) for result in results], indent=1))
    table = scores(results)
    for package, (noticed, tried) in table.items():
        print(
            f"{package:22} {noticed:4} of {tried:4} {noticed / tried:6.0%}" + ("" if noticed / tried >= SCORE else f"  below {SCORE:.0%}")
        )
    for kind, (noticed, tried) in scores(results, lambda result: result.mutation.kind).items():
        print(f"{kind:42} {noticed:4} of {tried:4} {noticed / tried:6.0%}")
    noticed, tried = (sum(one[place] for one in table.values()) for place in (0, 1))
    print(f"{'all':22} {noticed:4} of {tried:4} {noticed / max(tried, 1):6.0%}; the survivors are in {CACHE / 'survivors.diff'}")
    return 0 if all(noticed / tried >= SCORE for noticed, tried in table.values()) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(f"tools.mutants.drawn: {error}")
