"""Discovery of installed plugins from the metadata of distributions. Nothing is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import attrs
import importlib_metadata

from quark.base.version import VERSION

if TYPE_CHECKING:
    from importlib_metadata import EntryPoint

GROUP = "quark"
CORE = "quark-core"
RUN_TIME = "run-time"
"""Distribution name of records that a program registers while it runs."""


def normalized(distribution: str) -> str:
    """Return the normalized name of a distribution, in the form in which package indexes compare names.

    >>> normalized("Quark_Schemes")
    'quark-schemes'
    """
    return re.sub(r"[-_.]+", "-", distribution).lower()


@attrs.frozen
class Source:
    """Where a plugin comes from. Every message about the plugin shows its source.

    Attributes:
        distribution: Normalized name of the distribution, such as ``"acme-quant"``.
        version: Version of the distribution.
        module: Target of the entry point, such as ``"acme_quant.plugin"``.
        entry_point: Name of the entry point, such as ``"acme"``.
    """

    distribution: str
    version: str = ""
    module: str = ""
    entry_point: str = ""

    def __str__(self) -> str:
        where = f" ({self.module})" if self.module else ""
        if not self.entry_point:
            return f"{self.distribution} {self.version}".rstrip() + where
        return f"plugin '{self.entry_point}' of {self.distribution} {self.version}{where}"


@attrs.frozen
class Candidate:
    """A plugin that is installed and not yet imported.

    Attributes:
        source: Where the plugin comes from.
        entry_point: Entry point that leads to the plugin.
        unmet: The requirements of the distribution that the installed core does not meet. Each element is a
            pair: the requirement, and a clause that says why the core does not meet it.
    """

    source: Source
    entry_point: EntryPoint
    unmet: tuple[tuple[str, str], ...] = ()


@attrs.frozen
class Settings:
    """Settings for plugins, from environment variables.

    Attributes:
        strict: Whether quark raises the failure of a plugin, instead of recording it
            (``QUARK_STRICT_PLUGINS``).
        only: Distributions or entry points to use (``QUARK_PLUGINS``, separated by commas). If it is None,
            quark uses all plugins.
        disabled: Distributions or entry points to leave out, even if they are in ``only``
            (``QUARK_DISABLED_PLUGINS``, separated by commas).
    """

    strict: bool = False
    only: frozenset[str] | None = None
    disabled: frozenset[str] = frozenset()

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Return the settings in three environment variables. An empty variable counts as not set."""
        only = _listed(environ.get("QUARK_PLUGINS", ""))
        return cls(
            strict=environ.get("QUARK_STRICT_PLUGINS", "").strip().lower() not in {"", "0", "false", "no", "off"},
            only=only or None,
            disabled=_listed(environ.get("QUARK_DISABLED_PLUGINS", "")),
        )

    def left_out_by(self, source: Source) -> str | None:
        """Return the name of the environment variable that leaves this plugin out. Return None if no variable
        does."""
        names = {source.distribution, normalized(source.entry_point)}
        if names & self.disabled:
            return "QUARK_DISABLED_PLUGINS"
        return "QUARK_PLUGINS" if self.only is not None and not names & self.only else None


def name_in(requirement: str) -> str:
    """Return the normalized name at the beginning of a requirement. The text after the name may be malformed.

    >>> name_in("Quark_Core[all]>=1,<2")
    'quark-core'
    """
    return normalized(re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0])


def _listed(text: str) -> frozenset[str]:
    return frozenset(normalized(part.strip()) for part in text.split(",") if part.strip())


def _unmet(requirements: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return the requirements on quark-core that the installed quark-core does not meet. Each has a reason.

    An installer does not install a plugin with unmet requirements, unless a user tells the installer to
    ignore dependencies.
    """
    mine = [text for text in requirements if name_in(text) == CORE and text != f"{CORE}=={VERSION}"]
    if not mine:
        return ()
    from packaging.requirements import InvalidRequirement, Requirement  # not above: a listing without third-party plugins does not need it

    unmet = []
    for text in mine:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            unmet.append((f"'{text}'", "this text is not a valid requirement"))
            continue
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and not requirement.specifier.contains(VERSION, prereleases=True):
            unmet.append((f"{CORE}{requirement.specifier}", f"{CORE} {VERSION} is installed"))
    return tuple(unmet)


def discover(path: Iterable[str] | None = None, group: str = GROUP) -> tuple[Candidate, ...]:
    """Return the entry points of a group in all distributions, sorted by the name of the distribution.

    If two distributions use the same name for an entry point, both entry points are returned. If two folders
    of ``path`` contain the same distribution, the first folder is used, as for imports.

    Args:
        path: Folders to search. The default is ``sys.path``.
        group: Entry-point group. The group of plugins is ``"quark"``.
    """
    distributions = importlib_metadata.distributions() if path is None else importlib_metadata.distributions(path=list(path))
    by_name: dict[str, list[Candidate]] = {}
    for distribution in distributions:
        if not (distribution.read_text("entry_points.txt") or ""):
            continue
        points = [point for point in distribution.entry_points if point.group == group]
        if not points or (name := normalized(distribution.name)) in by_name:
            continue
        unmet = _unmet(distribution.requires or ())
        by_name[name] = [Candidate(Source(name, distribution.version, point.value, point.name), point, unmet) for point in points]
    return tuple(candidate for name in sorted(by_name) for candidate in by_name[name])


def active(group: str) -> list[Candidate]:
    """Return the entry points of a group that no environment variable leaves out."""
    settings = Settings.from_environ(os.environ)
    return [candidate for candidate in discover(group=group) if settings.left_out_by(candidate.source) is None]
