"""Facts about a distribution: the plugins, their failures and records, the metadata, the source."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import importlib_metadata

from quark.plugins.discovery import CORE, Source
from quark.plugins.registry import Registered, Registry
from quark_devkit.check import CheckFailedError, NotApplicableError, assume
from quark_devkit.expected_failures import find_pyproject
from quark_devkit.subject import Subject


def refuse_left_out(subject: Subject) -> None:
    """Raise NotApplicableError if an environment variable leaves out the distribution. None of its code runs
    then."""
    denied = [variable for source, variable in subject.catalog.left_out.items() if source.distribution == subject.distribution]
    if denied and not sources_of(subject):
        raise NotApplicableError(f"{denied[0]} in the environment leaves it out, so none of its code runs")


def refuse_core(subject: Subject) -> None:
    """Raise NotApplicableError for the core itself, which has no entry point."""
    assume(subject.distribution != CORE, "it is the core itself, which other distributions require")


def sources_of(subject: Subject) -> list[Source]:
    """Return the plugins of the distribution. Plugins that failed are included, but not plugins that an
    environment variable leaves out."""
    catalog = subject.catalog
    sources = [*catalog.sources(), *(failure.source for failure in catalog.failures())]
    return list(dict.fromkeys(source for source in sources if source.distribution == subject.distribution))


def refuse_failures(subject: Subject, *stages: str) -> None:
    """Raise CheckFailedError with the first failure at these stages (`quark.plugins.failures.STAGES`)."""
    catalog = subject.catalog
    failures = [f for f in catalog.failures() if f.source.distribution == subject.distribution and f.stage in stages]
    if failures:
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        raise CheckFailedError(f"fails: {failures[0].error}{more}. Fix: {failures[0].fix}")


def claims_of(subject: Subject) -> list[tuple[Registry[Any], Registered]]:
    """Return the distribution's records, each with the registry that contains the record.

    Raises:
        NotApplicableError: The distribution registers no record.
    """
    refuse_left_out(subject)
    found = [(registry, claim) for registry in subject.catalog.registries.values() for claim in registry.claims()]
    own = [(registry, claim) for registry, claim in found if claim.source.distribution == subject.distribution]
    assume(own, "it registers no record")
    return own


def metadata_of(subject: Subject) -> importlib_metadata.Distribution:
    """Return the metadata of the installed distribution.

    Raises:
        NotApplicableError: The distribution is not installed: the running program added the plugin.
    """
    try:
        return importlib_metadata.Distribution.from_name(subject.distribution)
    except importlib_metadata.PackageNotFoundError:
        raise NotApplicableError("it is not installed: the running program added its plugin") from None


def source_directory(subject: Subject) -> Path:
    """Return the directory of the distribution's ``pyproject.toml``.

    Raises:
        NotApplicableError: The directory is not known.
    """
    refuse_left_out(subject)
    if subject.source_directory is not None:
        return subject.source_directory
    pyproject = find_pyproject(subject.distribution)
    if pyproject is None:
        reason = "its source is not known: run the check in its directory, or install it with pip install -e"
        raise NotApplicableError(reason)
    return pyproject.parent


def requirements_of(subject: Subject) -> list[str]:
    """Return the distribution's requirements from the metadata, or from ``pyproject.toml`` if there is no
    metadata.

    Raises:
        NotApplicableError: Neither the metadata nor the ``pyproject.toml`` is known.
        CheckFailedError: The ``pyproject.toml`` cannot be read.
    """
    try:
        return list(metadata_of(subject).requires or ())
    except NotApplicableError:
        file = source_directory(subject) / "pyproject.toml"
    try:
        return [str(text) for text in tomllib.loads(file.read_text(encoding="utf-8"))["project"].get("dependencies", ())]
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise CheckFailedError(f"has a pyproject.toml that cannot be read ({type(error).__name__}: {error})") from None
