"""Plugin of quark-devkit: the commands ``quark check`` and ``quark new-plugin``.

Nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Iterator

from quark.plugins import CommandRecord, hookimpl

__all__ = ["QUARK_API", "quark_register_commands"]

QUARK_API = (2, 2)


@hookimpl
def quark_register_commands() -> Iterator[CommandRecord]:
    """Yield the commands for authors of plugins."""
    yield CommandRecord(
        name="new-plugin",
        summary="Write a distribution with plugins of the chosen kinds: typed code, conformance tests, a README, files for CI.",
        command="quark_devkit.commands.new_plugin:new_plugin",
    )
    yield CommandRecord(
        name="check",
        summary="Check a distribution against the contracts of quark's plugin API; the exit code is 1 if a check fails.",
        command="quark_devkit.commands.check:check",
    )
