"""Lists records of plugins in a separate process, to observe imports, output, side effects and cost.

The process imports this module as ``__main__``; nothing here may import torch.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from importlib_metadata import EntryPoint

from quark.base.lazy import LazyRef
from quark.plugins.discovery import GROUP, Candidate, Source
from quark.plugins.model_records import TemplateRecord
from quark.plugins.records import Record
from quark_devkit.side_effects import prints_reach_stdout, side_effects

if TYPE_CHECKING:
    from quark.plugins.catalog import Catalog

HEAVY = ("torch", "transformers")
"""Packages that a listing must not import: each takes seconds."""
_TIMEOUT = 120


@attrs.frozen
class Listing:
    """The observations of one listing.

    Attributes:
        error: Why there is no listing, as a predicate; empty after success.
        printed: The text that the process wrote to stdout.
        heavy: Packages of `HEAVY` that the process imported.
        seconds: Wall-clock time of importing the plugins and listing their records.
        cpu_seconds: CPU time of the same work.
        effects: Other side effects (`side_effects`), each as a predicate.
        records: Registered records, each as ``"schemes:acme_int3"``.
        unloadable: Referenced modules that cannot be imported, each with the error.
        helpless: Commands without a help text, each with the reason.
    """

    error: str = ""
    printed: str = ""
    heavy: tuple[str, ...] = ()
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    effects: tuple[str, ...] = ()
    records: tuple[str, ...] = ()
    unloadable: tuple[str, ...] = ()
    helpless: tuple[str, ...] = ()


def listed_alone(sources: tuple[Source, ...], installed: Path | None = None) -> Listing:
    """Return the `Listing` of only these plugins, in a fresh process with the import path of this process.

    Args:
        sources: The plugins, each with the module of its entry point.
        installed: A directory to put first on the import path. All referenced modules are then imported too.
    """
    path = tuple(entry or os.getcwd() for entry in sys.path)
    return _listed(sources, path if installed is None else (str(installed), *path), installed is not None)


def modules_of(record: Record) -> Iterator[str]:
    """Yield the modules that a record points at."""
    for value in (*(getattr(record, field.name) for field in attrs.fields(type(record))), *record.exports.values()):
        if isinstance(value, LazyRef):
            yield value.module
    if isinstance(record, TemplateRecord) and record.modeling is not None:
        yield record.modeling


@lru_cache(maxsize=32)
def _listed(sources: tuple[Source, ...], path: tuple[str, ...], loads: bool) -> Listing:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        out = Path(directory) / "listing.json"
        arguments = [json.dumps([attrs.asdict(source) for source in sources]), str(out), "load" if loads else ""]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("QUARK_")}
        environment |= {"PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", __name__, *arguments]
        try:
            done = subprocess.run(
                command, check=False, cwd=directory, env=environment, capture_output=True, timeout=_TIMEOUT, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            return Listing(error=f"is not listed within {_TIMEOUT} s")
        if not out.is_file():
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            return Listing(error=": ".join([f"ends the process that lists it, with exit code {done.returncode}", *last]))
        seen: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        seen = {key: tuple(value) if isinstance(value, list) else value for key, value in seen.items()}
        return Listing(printed=done.stdout.decode(errors="replace"), **seen)


def _main(plugins: str, out: str, loads: str) -> None:
    """List the plugins, and write the observations as JSON."""
    from quark.plugins.catalog import Catalog
    from quark_workbench.cli.installed import kind_report

    sources = [Source(**row) for row in json.loads(plugins)]
    with prints_reach_stdout(), side_effects() as effects:
        begin, cpu_begin = time.perf_counter(), time.process_time()
        catalog = Catalog(Candidate(source, EntryPoint(source.entry_point, source.module, GROUP)) for source in sources)
        for kind in catalog.registries:
            kind_report(catalog, kind)
        for name in catalog.algorithms.names():
            with contextlib.suppress(Exception):  # another check loads every reference and reports the errors
                catalog.algorithms.options(name)
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    seen = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "effects": effects,
        "heavy": [package for package in HEAVY if package in sys.modules],
        "records": sorted(f"{kind}:{record.name}" for kind, record in records_of(catalog, sources)),
        "unloadable": _unloadable(catalog, sources) if loads else [],
    }
    seen["helpless"] = _helpless(catalog, sources)
    Path(out).write_text(json.dumps(seen), encoding="utf-8", newline="\n")


def records_of(catalog: Catalog, sources: list[Source]) -> Iterator[tuple[str, Record]]:
    """Yield the records of plugins, each with its kind."""
    for kind, registry in catalog.registries.items():
        yield from ((kind, claim.record) for claim in registry.claims() if claim.source in sources)


def _helpless(catalog: Catalog, sources: list[Source]) -> list[str]:
    """Return the commands whose ``--help`` fails or imports a package of `HEAVY`, each with the reason."""
    from quark.plugins import using
    from quark_workbench.cli.main import program

    complaints = []
    for name in [record.name for kind, record in records_of(catalog, sources) if kind == "commands"]:
        before = set(sys.modules)
        try:
            with using(catalog), contextlib.redirect_stdout(io.StringIO()):
                program()([name, "--help"], standalone_mode=False)
        except (Exception, SystemExit) as error:  # third-party code may raise anything
            if not isinstance(error, SystemExit) or error.code:
                complaints.append(f"'{name}' fails ({type(error).__name__}: {error})")
        if heavy := [package for package in HEAVY if package in set(sys.modules) - before]:
            complaints.append(f"'{name}' imports {' and '.join(heavy)}")
    return complaints


def _unloadable(catalog: Catalog, sources: list[Source]) -> list[str]:
    complaints = []
    for module in sorted({module for _, record in records_of(catalog, sources) for module in modules_of(record)}):
        try:
            __import__(module)
        except (Exception, SystemExit) as error:  # third-party code may raise anything
            complaints.append(f"{module} ({type(error).__name__}: {error})")
    return complaints


if __name__ == "__main__":
    _main(*sys.argv[1:])
