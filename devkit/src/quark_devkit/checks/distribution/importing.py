"""Checks of imports: modules contain the same tensors in any state of the process, and change no shared
state."""

from __future__ import annotations

from quark_devkit.check import NotApplicableError, assume, check, require
from quark_devkit.checks.distribution.facts import refuse_core, refuse_left_out, sources_of
from quark_devkit.checks.distribution.imported_alone import Imported, imported_alone
from quark_devkit.subject import Subject


def _observed(subject: Subject, *, is_plain: bool) -> Imported:
    """Return the observations of a fresh process that imports the distribution.

    Raises:
        NotApplicableError: The distribution has no module that can be imported.
        CheckFailedError: The process fails.
    """
    refuse_core(subject)
    refuse_left_out(subject)
    if any(f.source.distribution == subject.distribution and f.stage == "import" for f in subject.catalog.failures()):
        raise NotApplicableError("it cannot be imported")
    sources = tuple(source for source in sources_of(subject) if source.module)
    assume(sources, "it is not installed: the running program added its plugin")
    seen = imported_alone(sources, is_plain=is_plain)
    require(not seen.error, seen.error)
    return seen


@check("distribution", since=2)
def imports_to_the_same_tensors(subject: Subject) -> None:
    """The distribution's modules contain the same tensors, to the bit, if they are first imported in another
    state: with meta as the default device, bfloat16 as the default dtype, an empty environment and another
    hash seed. transformers builds models with such defaults."""
    plain, other = (_observed(subject, is_plain=is_plain).tensors for is_plain in (True, False))
    different = sorted(name for name in {*plain, *other} if plain.get(name) != other.get(name))
    for name in different[:1]:
        seen, wanted = other.get(name, "absent"), plain.get(name, "absent")
        require(False, f"has '{name}' as {seen} if it is imported in another state, but as {wanted} in a fresh process")


@check("distribution", since=2)
def changes_nothing_when_it_is_imported(subject: Subject) -> None:
    """Importing the modules that the records reference changes no shared state: classes and functions of
    other packages, logging, warnings, defaults of torch, threads, random states, environment."""
    changed = dict.fromkeys(name for is_plain in (True, False) for name in _observed(subject, is_plain=is_plain).changed)
    require(not changed, f"changes {', '.join(list(changed)[:3])} when it is imported: all code of the process shares that state")
