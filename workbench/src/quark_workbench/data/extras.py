"""Imports of optional packages. The error for a missing package shows the pip command that installs it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from quark.errors import MissingPluginError

__all__ = ["extra"]

_INSTALLED_BY = {
    "PIL": "pillow",
    "datasets": "'quark-core[data]'",
    "lm_eval": "'quark-workbench[lm-eval]'",
    "pyarrow": "'quark-core[data]'",
}
"""Dictionary from package to the distribution that pip installs, if the two names differ."""


def extra(module: str, wanted_for: str) -> Any:
    """Import an optional module and return it.

    Args:
        module: Full name of the module.
        wanted_for: What needs the module, in the plural, for the message: ``"Parquet files"``.

    Raises:
        MissingPluginError: (an ImportError) The package is not installed; the message has the pip command.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0].lstrip("_") != package:  # such as _bz2, which bz2 imports
            raise  # the package is installed, but a module that it needs is missing
        command = f"pip install {_INSTALLED_BY.get(package, package)}"
        raise MissingPluginError(f"{wanted_for} need the package '{package}', which is not installed. Install it: {command}") from None
