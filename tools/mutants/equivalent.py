"""Changes that make no difference: the entries and keys of `equivalent.toml`."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

from tools.mutants.behaviours import behaviours_of
from tools.mutants.operators import Mutation, mutations_of


def every_change(file: str, source: str) -> list[Mutation]:
    """Return all changes of a file, of every kind."""
    return [*mutations_of(file, source), *behaviours_of(file, source)]


def stale_marks(tree: Path, known: set[tuple[str, ...]]) -> list[str]:
    """Return the entries of `equivalent.toml` whose code no longer exists. Each is given as the file and the
    line of code."""
    files = {file for file, *_ in known if (tree / file).is_file()}
    there = {key(tree, one) for file in files for one in every_change(file, (tree / file).read_text(encoding="utf-8"))}
    return sorted(f"{file}: {old}" for file, function, old, new in known if (file, function, old, new) not in there)


def key(tree: Path, mutation: Mutation) -> tuple[str, ...]:
    """Return the key of a change in `equivalent.toml`: the file, the function, and the changed lines before
    and after the change."""
    before, after = changed_lines(tree, mutation)
    return mutation.file, mutation.function, before, after


def changed_lines(tree: Path, mutation: Mutation) -> tuple[str, str]:
    """Return the lines that a change affects: their text before and after the change, each joined into one
    line."""
    source = (tree / mutation.file).read_text(encoding="utf-8")
    begin = source.rfind("\n", 0, mutation.start) + 1
    end = source.find("\n", mutation.end) if "\n" in source[mutation.end :] else len(source)
    before, after = source[begin:end], source[begin : mutation.start] + mutation.new + source[mutation.end : end]
    return " ".join(before.split()), " ".join(after.split())


def skipped(table: Path) -> tuple[list[str], list[str]]:
    """Return the files that are skipped, and the files in which numbers are skipped, since these are
    positions in pictures."""
    entries = tomllib.loads(table.read_text(encoding="utf-8")).get("skipped", [])
    needed = [entry for entry in entries if "needs" in entry and importlib.util.find_spec(entry["needs"]) is None]
    return [entry["file"] for entry in needed], [entry["file"] for entry in entries if entry.get("numbers")]


def equivalent_changes(table: Path) -> dict[tuple[str, ...], str]:
    """Return the reasons why changes make no difference, by the key of the change."""
    entries = tomllib.loads(table.read_text(encoding="utf-8")).get("equivalent", [])
    return {(entry["file"], entry["function"], entry["old"], entry["new"]): entry["reason"] for entry in entries}
