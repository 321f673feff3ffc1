"""Where a record comes from, and what went wrong with a plugin."""

from __future__ import annotations

import attrs


class QuarkPluginWarning(UserWarning):
    """A plugin is broken and was left out; everything else works."""


@attrs.frozen
class Source:
    """The distribution behind a record; every error about the record shows it."""

    distribution: str
    version: str
    module: str
    entry_point: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@attrs.frozen
class PluginFailure:
    """One thing that went wrong with one plugin.

    Attributes:
        source: Whose plugin it is.
        stage: ``"import"``, ``"register"``, ``"call"`` or ``"validate"``.
        error: What happened.
        cure: What to do about it.
    """

    source: Source
    stage: str
    error: str
    cure: str

    def __str__(self) -> str:
        s = self.source
        return f"plugin '{s.entry_point}' of {s.distribution} {s.version} ({s.module}) failed at {self.stage}: {self.error}. {self.cure}"
