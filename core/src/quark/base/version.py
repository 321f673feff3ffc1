"""The version of every distribution in this repository, and a check that amd-quark is not installed."""

from __future__ import annotations

from quark.errors import EnvironmentConflictError

__all__ = ["VERSION", "refuse_rival"]

VERSION = "1.0.0a1"

_RIVAL = "amd-quark"


def refuse_rival() -> None:
    """Raise if amd-quark, which owns the import name ``quark`` too, is installed in this environment.

    Raises:
        EnvironmentConflictError: It is; the message says how to part them.
    """
    import importlib_metadata as metadata  # not above: `import quark` stays free of it

    try:
        version = metadata.version(_RIVAL)
    except metadata.PackageNotFoundError:
        return
    raise EnvironmentConflictError(
        f"{_RIVAL} {version} is installed in the same environment as quark-core, and both own the import name 'quark'. "
        f"Keep them in separate virtual environments, or run: pip uninstall {_RIVAL}, then pip install --force-reinstall quark-core"
    )
