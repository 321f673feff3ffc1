"""Checks of registration: entry points, hooks, supported versions of the core, and the cost of an import."""

from __future__ import annotations

from collections import Counter

from packaging.requirements import InvalidRequirement, Requirement

from quark.plugins.api_version import API_VERSION
from quark.plugins.collection import MOST_RECORDS
from quark.plugins.discovery import CORE, GROUP, name_in
from quark_devkit.check import CheckFailedError, NotApplicableError, assume, check, require
from quark_devkit.checks.distribution.facts import (
    claims_of,
    metadata_of,
    refuse_core,
    refuse_failures,
    refuse_left_out,
    requirements_of,
    sources_of,
)
from quark_devkit.checks.distribution.listed_alone import Listing, listed_alone
from quark_devkit.subject import Subject

MOST_SECONDS, MOST_CPU_SECONDS = 5.0, 1.5
"""Longest wall-clock and CPU time for importing and listing the plugins of a distribution.
"""


def _listing(subject: Subject) -> Listing:
    """Return the `Listing` of the distribution alone.

    Raises:
        NotApplicableError: The distribution has no module that can be imported.
        CheckFailedError: The listing process fails.
    """
    refuse_left_out(subject)
    if any(f.source.distribution == subject.distribution and f.stage == "import" for f in subject.catalog.failures()):
        raise NotApplicableError("it cannot be imported")
    sources = tuple(source for source in sources_of(subject) if source.module)
    assume(sources, "it is not installed: the running program added its plugin")
    listing = listed_alone(sources)
    require(not listing.error, listing.error)
    return listing


@check("distribution")
def is_found_by_an_entry_point(subject: Subject) -> None:
    """The installed distribution has entry points of the group quark, and each can be imported."""
    refuse_core(subject)
    denied = [variable for source, variable in subject.catalog.left_out.items() if source.distribution == subject.distribution]
    if denied:
        raise CheckFailedError(f"is left out by the environment variable {denied[0]}, so nothing is checked: change or unset it")
    refuse_failures(subject, "import")
    points = [point for point in metadata_of(subject).entry_points if point.group == GROUP]
    require(points, f"has no entry point of the group {GROUP}: add [project.entry-points.{GROUP}] to pyproject.toml")


@check("distribution")
def fits_this_core(subject: Subject) -> None:
    """The distribution supports the installed core and the version of its plugin API."""
    refuse_left_out(subject)
    refuse_failures(subject, "require")


@check("distribution")
def requires_the_core_within_bounds(subject: Subject) -> None:
    """The distribution requires quark-core with a lower and an upper bound, since a major version may change
    protocols.
    """
    refuse_core(subject)
    texts = [text for text in requirements_of(subject) if name_in(text) == CORE]
    try:
        own = [requirement for requirement in map(Requirement, texts) if not _is_extra(requirement)]
    except InvalidRequirement as error:
        raise CheckFailedError(f"requires '{texts[0]}', which is not a valid requirement ({error})") from None
    require(own, f"does not require {CORE}: add '{CORE}>=…,<…' to its dependencies")
    operators = {specifier.operator for requirement in own for specifier in requirement.specifier}
    fixed = bool(operators & {"==", "===", "~="})
    require(fixed or operators & {">=", ">"}, f"requires '{own[0]}' without a lower bound: write >= and the oldest version that you test")
    require(fixed or operators & {"<", "<="}, f"requires '{own[0]}' without an upper bound: write < and the next major version")


def _is_extra(requirement: Requirement) -> bool:
    """Return whether a requirement is only for an extra, or only for another platform or Python version."""
    return requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})


@check("distribution")
def declares_its_range_of_api_versions(subject: Subject) -> None:
    """Each plugin module that registers records declares the supported versions of the plugin API in
    QUARK_API."""
    refuse_core(subject)
    claims_of(subject)
    for source in subject.catalog.unstated():
        if source.distribution == subject.distribution:
            fix = f"write QUARK_API = ({API_VERSION}, {API_VERSION}) in the plugin module"
            raise CheckFailedError(f"does not say for which versions of the plugin API '{source.module}' was written: {fix}")


@check("distribution")
def has_hooks_that_are_called(subject: Subject) -> None:
    """Each plugin of the distribution has a hook. If the name of a function resembles the name of a hook, the
    two are equal, and the function is marked with ``@hookimpl``.
    """
    refuse_left_out(subject)
    refuse_failures(subject, "register")


@check("distribution")
def registers_records_that_are_kept(subject: Subject) -> None:
    """No hook raises or exceeds a limit, and every record is valid and has a unique name."""
    refuse_left_out(subject)
    refuse_failures(subject, "call", "validate")


@check("distribution")
def registers_a_bounded_number_of_records(subject: Subject) -> None:
    """A hook yields fewer records than the limit. If names follow a rule, they belong in one record with
    options."""
    counts = Counter(registry.kind.hook for registry, _ in claims_of(subject))
    for hook, count in counts.items():
        require(count < MOST_RECORDS, f"yields {count} records from '{hook}', but at most {MOST_RECORDS} are allowed")


@check("distribution")
def registers_without_torch(subject: Subject) -> None:
    """Listing records, schemes and settings imports neither torch nor transformers, which take seconds."""
    heavy = _listing(subject).heavy
    fix = "import it in the modules that records point at, not in the plugin module, the schemes or the settings"
    require(not heavy, f"imports {' and '.join(heavy)} when it is listed: {fix}")


@check("distribution")
def registers_quickly(subject: Subject) -> None:
    """Importing and listing the distribution takes almost no time, since every listing and shell completion
    waits for it.
    """
    listing = _listing(subject)
    took = f"takes {listing.cpu_seconds:.1f} s of CPU time and {listing.seconds:.1f} s in all to be listed"
    quick = listing.cpu_seconds <= MOST_CPU_SECONDS and listing.seconds <= MOST_SECONDS
    require(
        quick,
        f"{took}, but at most {MOST_CPU_SECONDS} s and {MOST_SECONDS} s are allowed: move the work to the modules that records point at",
    )


@check("distribution")
def prints_nothing_when_it_is_listed(subject: Subject) -> None:
    """Importing and listing the distribution writes nothing to stdout, since that would break ``--json``."""
    printed = _listing(subject).printed
    require(not printed, f"writes {printed[:80]!r} to stdout when it is listed: use logging")


@check("distribution", since=2)
def shows_the_help_of_its_commands(subject: Subject) -> None:
    """``quark COMMAND --help`` works for each command of the distribution, and imports neither torch nor
    transformers."""
    helpless = _listing(subject).helpless
    fix = "annotate arguments as typer does, and import torch inside the function"
    require(not helpless, f"has a command without a quick --help: {'; '.join(helpless[:2])}. Fix: {fix}")


@check("distribution")
def does_nothing_else_when_it_is_listed(subject: Subject) -> None:
    """Importing and listing the distribution opens no connection, starts no program or thread, writes no
    file, and does not change the process.
    """
    effects = _listing(subject).effects
    require(not effects, f"{' and '.join(effects[:3])} when it is listed: do that when the plugin is used")
