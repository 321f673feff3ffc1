"""The version of all distributions in this repository, and checks of the packages installed beside them.

Only this module asks for the version of transformers.
"""

from __future__ import annotations

from quark.errors import EnvironmentConflictError

VERSION = "1.0.0a1"

TRANSFORMERS = ">=5.4,<6"
"""The versions of transformers that this project supports.

Up to 5.3, the loader of transformers needs the scale of a quantized layer under two names at once: the name
in the checkpoint and the name in the module. Version 4 has no loader that converts tensors, but quark needs
such a loader to read models.
"""

_RIVAL = "amd-quark"


def refuse_rival() -> None:
    """Raise an error if amd-quark is installed in this environment, because it has the same import name
    ``quark``.

    Raises:
        EnvironmentConflictError: amd-quark is installed. The message says how to separate it from quark-core.
    """
    version = _installed(_RIVAL)
    if version is not None:
        raise EnvironmentConflictError(
            f"{_RIVAL} {version} is installed in the same environment as quark-core, and both own the import name 'quark'. "
            f"Keep them in separate virtual environments, or run: pip uninstall {_RIVAL}, then pip install --force-reinstall quark-core"
        )


def refuse_unfit_environment() -> None:
    """Raise an error if quark cannot work in this environment.

    Raises:
        EnvironmentConflictError: amd-quark is installed, or the installed version of transformers is not
            supported.
    """
    from packaging.specifiers import SpecifierSet  # not above, as in `_installed`

    refuse_rival()
    version = transformers_version()
    if version is not None and not SpecifierSet(TRANSFORMERS).contains(version, prereleases=True):
        raise EnvironmentConflictError(
            f"transformers {version} is installed, but quark-core {VERSION} needs transformers{TRANSFORMERS}. "
            f"Run: pip install 'transformers{TRANSFORMERS}'"
        )


def transformers_version() -> str | None:
    """Return the version of the installed transformers, or None if transformers is not installed."""
    return _installed("transformers")


def _installed(distribution: str) -> str | None:
    import importlib_metadata as metadata  # not above: `import quark` stays free of it

    try:
        version: str = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
    return version
