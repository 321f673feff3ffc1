"""Two distributions cannot own the import name ``quark``: refuse to run beside the other one."""

from __future__ import annotations

import importlib_metadata as metadata

from quark.errors import EnvironmentConflictError

__all__ = ["refuse_rival"]

_RIVAL = "amd-quark"


def refuse_rival() -> None:
    """Raise if amd-quark is installed in this environment: its files and ours would lie in one folder.

    Raises:
        EnvironmentConflictError: It is; the message says how to part them.
    """
    try:
        version = metadata.version(_RIVAL)
    except metadata.PackageNotFoundError:
        return
    raise EnvironmentConflictError(
        f"{_RIVAL} {version} is installed in the same environment as quark-core, and both own the import name 'quark'. "
        f"Keep them in separate virtual environments, or run: pip uninstall {_RIVAL}, then pip install --force-reinstall quark-core"
    )
