"""Optional packages, imported when needed; the error for a missing package has the pip command."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from quark.errors import MissingPluginError

__all__ = ["extra"]

_EXTRAS = {"datasets": "data", "pyarrow": "data", "lm_eval": "lm-eval", "vllm": None}
"""The extra of quark-core with each package; None for a package that you install by its name."""
_DISTRIBUTIONS = {"PIL": "pillow"}
"""Names to install of packages that are imported by another name."""


def extra(module: str, wanted_for: str) -> Any:
    """Return an optional module.

    Args:
        module: Its full name.
        wanted_for: The user of the module, for the message.

    Raises:
        MissingPluginError: (an ImportError) The package is not installed; the message has the pip command.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0].lstrip("_") != package:  # _bz2 of bz2
            raise  # the package is there, and something that it needs is not
        name = _EXTRAS.get(package)
        command = f"pip install 'quark-core[{name}]'" if name else f"pip install {_DISTRIBUTIONS.get(package, package)}"
        raise MissingPluginError(f"{wanted_for} need the package '{package}'. Install it: {command}") from None
