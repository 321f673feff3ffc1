"""Break the code on purpose, one change at a time, and report which changes the tests notice.

    python -m tools.mutants                 # every change of the tables beside this file
    python -m tools.mutants NAME ...        # changes whose name starts with one of these
    python -m tools.mutants --whole NAME    # if the listed tests pass, runs the whole suite too

The program changes a copy of the working tree. First, the listed tests must pass without a change. Then each
change gets one of four verdicts. It is *killed* if a test fails; the printed line names the test and the
reason. It *survives* if every test passes. It is *stale* if the text that it replaces does not occur exactly
once. It is *broken* if pytest cannot run the tests, for example after a failed import. The exit status is 0
if every change is killed.

A table is a TOML file of changes:

    [[mutant]]
    name = "short-name"
    says = "One sentence that says what is wrong with the changed code."
    tests = ["path/to/test_file.py::test_that_notices"]

    [[mutant.edits]]              # one or more; all are applied together
    file = "path/to/source.py"
    old = "text that occurs once"
    new = "text in its place"
"""

from __future__ import annotations

import argparse
import enum
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SECONDS = 900  # limit of one run of pytest, so that an endless loop counts as noticed


class Verdict(enum.Enum):
    """The possible verdicts on a change."""

    KILLED = "killed"
    SURVIVED = "survived"
    STALE = "stale"
    BROKEN = "broken"


@attrs.frozen
class Edit:
    """A text in a file, and the text that replaces it."""

    file: str
    old: str
    new: str


@attrs.frozen
class Mutant:
    """A change that makes the code wrong, and the tests that must notice."""

    name: str
    says: str
    tests: tuple[str, ...]
    edits: tuple[Edit, ...]


@attrs.frozen
class Outcome:
    """The verdict on one change, with a line from pytest or with the reason."""

    verdict: Verdict
    reason: str


def read_tables(tables: Sequence[Path]) -> list[Mutant]:
    """Return the changes of all tables, in order.

    Raises ValueError if two changes have the same name, or if a change has no test or no edit.
    """
    mutants = [
        Mutant(entry["name"], entry["says"], tuple(entry["tests"]), tuple(Edit(**edit) for edit in entry["edits"]))
        for table in tables
        for entry in tomllib.loads(table.read_text(encoding="utf-8")).get("mutant", ())
    ]
    names = [mutant.name for mutant in mutants]
    for mutant in mutants:
        if names.count(mutant.name) > 1:
            raise ValueError(f"two changes are named {mutant.name!r}: rename one")
        if not mutant.tests or not mutant.edits:
            raise ValueError(f"change {mutant.name!r} needs tests and edits: neither list may be empty")
    return mutants


def chosen(mutants: Sequence[Mutant], prefixes: Sequence[str]) -> list[Mutant]:
    """Return the changes whose name starts with one of `prefixes`; all changes if there are no prefixes.

    Raises ValueError if no name starts with a prefix.
    """
    for prefix in prefixes:
        if not any(mutant.name.startswith(prefix) for mutant in mutants):
            raise ValueError(f"no change has a name that starts with {prefix!r}; there are: {', '.join(mutant.name for mutant in mutants)}")
    return [mutant for mutant in mutants if not prefixes or mutant.name.startswith(tuple(prefixes))]


def copy_of_the_tree(root: Path, target: Path) -> Path:
    """Copy the files of `root` that git does not ignore to `target`; return `target`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=root, check=True, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name, follow_symlinks=False)
    return target


def stale_edit(tree: Path, mutant: Mutant) -> str | None:
    """Return the reason why the change cannot be applied to `tree`; None if each old text occurs exactly once
    in its file."""
    for edit in mutant.edits:
        path = tree / edit.file
        if not path.is_file():
            return f"there is no file {edit.file}"
        if (times := path.read_text(encoding="utf-8").count(edit.old)) != 1:
            return f"its text occurs {times} times in {edit.file}, not once: {edit.old.strip().splitlines()[0]!r} …"
    return None


@contextmanager
def applied(tree: Path, mutant: Mutant) -> Iterator[None]:
    """Apply the change to `tree` while the body runs."""
    before = {tree / edit.file: (tree / edit.file).read_text(encoding="utf-8") for edit in mutant.edits}
    try:
        for edit in mutant.edits:
            path = tree / edit.file
            path.write_text(path.read_text(encoding="utf-8").replace(edit.old, edit.new), encoding="utf-8", newline="\n")
        yield
    finally:
        for path, text in before.items():
            path.write_text(text, encoding="utf-8", newline="\n")


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run `tests` with the sources of `tree`, or the whole suite if `tests` is empty. Return the exit status
    and the last lines of the output.

    Python writes no bytecode in these runs. It would compare only the length of a source and the second of
    the last change, and so use old bytecode after a quick change of equal length.
    """
    sources = [str(tree), *sorted(str(path) for path in tree.glob("**/src"))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sources), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=short", *tests]
    try:
        ran = subprocess.run(command, check=False, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return 1, f"FAILED the tests took more than {SECONDS} s"
    return ran.returncode, ran.stdout[-8000:] + ran.stderr[-2000:]


def outcome(tree: Path, mutant: Mutant, *, whole: bool) -> Outcome:
    """Apply one change and run its tests. With `whole`, also run the whole suite if these tests pass."""
    if (stale := stale_edit(tree, mutant)) is not None:
        return Outcome(Verdict.STALE, stale)
    with applied(tree, mutant):
        status, output = run_tests(tree, mutant.tests)
        if whole and status == 0:
            status, output = run_tests(tree, ())
    if status == 0:
        return Outcome(Verdict.SURVIVED, mutant.says)
    failures = re.findall(r"^(?:FAILED|ERROR) (.*)$", output, re.MULTILINE)
    errors = re.findall(r"^E  +(.*)$", output, re.MULTILINE)
    verdict = Verdict.KILLED if status == 1 else Verdict.BROKEN
    named = sorted(errors, key=lambda line: "Error" not in line)  # the line with the exception, if there are several
    return Outcome(verdict, " | ".join([*failures[:1], *named[:1]]) or " ".join(output.split())[-400:])


def run_all(tree: Path, mutants: Sequence[Mutant], *, whole: bool, say: Callable[[str], None]) -> dict[str, Outcome]:
    """Return the outcome of each change, by name.

    Raises ValueError if a listed test fails in the unchanged tree.
    """
    status, output = run_tests(tree, list(dict.fromkeys(test for mutant in mutants for test in mutant.tests)))
    if status != 0:
        raise ValueError(f"the listed tests fail in the unchanged tree. Fix them first:\n{output}")
    outcomes = {}
    for mutant in mutants:
        begun = time.perf_counter()
        outcomes[mutant.name] = one = outcome(tree, mutant, whole=whole)
        say(f"{one.verdict.value:8}  {time.perf_counter() - begun:4.0f} s  {mutant.name}: {one.reason}")
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    says = "break the code on purpose, and report which changes the tests notice"
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=says)
    parser.add_argument("names", nargs="*", metavar="NAME", help="beginnings of names of changes; default: all changes")
    parser.add_argument("--whole", action="store_true", help="run the whole suite for a change that its own tests do not notice")
    parser.add_argument("--list", action="store_true", help="list the changes and their staleness; run nothing")
    options = parser.parse_args(arguments)
    mutants = chosen(read_tables(sorted(HERE.glob("*.toml"))), options.names)
    if options.list:
        stale = [(mutant, stale_edit(ROOT, mutant)) for mutant in mutants]
        print("\n".join(f"{mutant.name}: {mutant.says}" + (f" [stale: {reason}]" if reason else "") for mutant, reason in stale))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        tree = copy_of_the_tree(ROOT, Path(directory))
        outcomes = run_all(tree, mutants, whole=options.whole, say=lambda line: print(line, flush=True))
    counts = {verdict: sum(one.verdict is verdict for one in outcomes.values()) for verdict in Verdict}
    print(", ".join(f"{count} {verdict.value}" for verdict, count in counts.items()) + f", of {len(outcomes)}")
    return 0 if counts[Verdict.KILLED] == len(outcomes) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(f"tools.mutants: {error}")
