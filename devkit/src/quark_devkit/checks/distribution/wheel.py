"""Checks of a distribution's wheel, built from a copy of its source and installed, offline."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

from quark.plugins.discovery import discover
from quark_devkit.check import CheckFailedError, NotApplicableError, assume, check, require
from quark_devkit.checks.distribution.facts import claims_of, refuse_core, source_directory, sources_of
from quark_devkit.checks.distribution.listed_alone import listed_alone, modules_of
from quark_devkit.subject import Subject

_NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "venv", "node_modules")
_TIMEOUT = 180


@check("distribution")
def builds_a_wheel(subject: Subject) -> None:
    """The distribution's source builds a wheel, without a network."""
    _built(subject)


@check("distribution")
def has_a_wheel_with_all_that_records_point_at(subject: Subject) -> None:
    """The wheel contains the plugin modules and every module of its packages that a record references."""
    files = _files(_built(subject))
    packages = {name.partition("/")[0].removesuffix(".py") for name in files}
    plugins = {source.module.partition(":")[0] for source in sources_of(subject) if source.module}
    pointed_at = {module for _, claim in claims_of(subject) for module in modules_of(claim.record) if module.partition(".")[0] in packages}
    for module in sorted(plugins | pointed_at):
        path = module.replace(".", "/")
        held = f"{path}/__init__.py" in files or any(name.startswith(f"{path}.") for name in files)  # .py, or compiled
        fix = "correct the package discovery in pyproject.toml"
        require(held, f"builds a wheel without the module '{module}', which a record or entry point names: {fix}")


@check("distribution")
def has_a_typed_wheel(subject: Subject) -> None:
    """Every package in the wheel has the marker py.typed, which type checkers need to read its
    annotations.
    """
    files = _files(_built(subject))
    for package in sorted(name.partition("/")[0] for name in files if name.endswith("/__init__.py") and name.count("/") == 1):
        fix = "add the file, and name it under package-data"
        require(f"{package}/py.typed" in files, f"builds a wheel without '{package}/py.typed': {fix}")


@check("distribution")
def registers_the_same_once_it_is_installed(subject: Subject) -> None:
    """The distribution registers the same records if it is installed from its wheel into an empty directory,
    and all references of the records can be imported.
    """
    refuse_core(subject)
    target = _installed(_built(subject))
    if isinstance(target, str):
        raise CheckFailedError(target)
    sources = tuple(c.source for c in discover([str(target)]) if c.source.distribution == subject.distribution)
    require(sources, "has no entry point of the group quark once it is installed from its wheel")
    listing = listed_alone(sources, target)
    require(not listing.error, f"{listing.error} once it is installed from its wheel")
    lost = sorted({f"{registry.kind.plural}:{claim.record.name}" for registry, claim in claims_of(subject)} - {*listing.records})
    require(not lost, f"does not register {', '.join(lost[:3])} once it is installed from its wheel")
    require(not listing.unloadable, f"cannot import {'; '.join(listing.unloadable[:3])} once it is installed from its wheel")


def _built(subject: Subject) -> Path:
    """Return the wheel.

    Raises:
        NotApplicableError: The distribution's source is not known, or the build backend is not installed.
        CheckFailedError: The wheel cannot be built.
    """
    directory = source_directory(subject).resolve()
    assume(_has_pip(), "pip, which builds the wheel, is not installed")
    try:
        system = tomllib.loads((directory / "pyproject.toml").read_text(encoding="utf-8")).get("build-system", {})
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise CheckFailedError(f"has a pyproject.toml that cannot be read ({error})") from None
    backend = str(system.get("build-backend", "setuptools.build_meta")).partition(":")[0].partition(".")[0]
    if "backend-path" not in system and importlib.util.find_spec(backend) is None:
        raise NotApplicableError(f"its build backend '{backend}' is not installed, and a check downloads nothing")
    wheel = _wheel(directory)
    if isinstance(wheel, str):
        raise CheckFailedError(wheel)
    return wheel


@cache
def _scratch() -> Path:
    """Return a directory for wheels; it is removed when the process ends."""
    directory = Path(tempfile.mkdtemp(prefix="quark-check-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


@cache
def _wheel(source: Path) -> Path | str:
    """Build a source directory, and return the wheel. If the build fails, return the reason instead, as a
    predicate."""
    work = Path(tempfile.mkdtemp(dir=_scratch()))
    shutil.copytree(source, work / "source", ignore=_NOT_COPIED, symlinks=True)
    complaint = _pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(work), str(work / "source"))
    wheels = list(work.glob("*.whl"))
    return complaint or (wheels[0] if wheels else "makes no wheel")


@cache
def _installed(wheel: Path) -> Path | str:
    """Install a wheel, and return the directory. If this fails, return the reason, as a predicate."""
    target = Path(tempfile.mkdtemp(dir=_scratch()))
    return _pip("install", "--no-deps", "--no-index", "--target", str(target), str(wheel)) or target


def _pip(*arguments: str) -> str:
    """Run pip. Return the error as a predicate of the distribution, or an empty text after success."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "PIP_NO_INPUT": "1"}
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_TIMEOUT, env=environment, cwd=_scratch())
    except subprocess.TimeoutExpired:
        return f"keeps pip busy for more than {_TIMEOUT} s"
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()] or lines
    return f"makes 'pip {arguments[0]}' fail: {' '.join(errors[-3:])}"


def _files(wheel: Path) -> set[str]:
    """Return the files in a wheel, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def _has_pip() -> bool:
    """Return whether pip is installed. Only the finder for import paths is asked.

    Before Python 3.12, the finder of setuptools treats such a question as an import. Python's own distutils
    then replaces setuptools' distutils for the rest of the process.
    """
    return PathFinder.find_spec("pip") is not None
