"""Code for the import paths of AMD Quark, such as ``quark.torch``. The distribution quark-amd registers these
paths.

It has an entry point of the group ``quark.import_paths`` that names a module with the functions `find_spec`,
`load` and `public_names`. This module, `quark_amd.finder`, is imported when a program imports one of these
paths.
"""

from __future__ import annotations

import functools
from importlib.machinery import ModuleSpec
from typing import Any

from quark.errors import MissingPluginError


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module 'quark.torch' has no attribute '{name}'", name=name)
    return _registered().load(__name__, name)


def __dir__() -> list[str]:
    return _registered().public_names(__name__)


@functools.cache
def _active() -> list[Any]:
    from quark.plugins.discovery import active  # not above: `import quark` stays free of pluggy and of metadata

    return active("quark.import_paths")


def _registered() -> Any:
    if len(_active()) > 1:
        both = " and by ".join(str(candidate.source) for candidate in _active())
        raise MissingPluginError(f"quark.torch is registered by {both}: leave one out with QUARK_DISABLED_PLUGINS")
    for candidate in _active():
        try:
            return candidate.entry_point.load()
        except Exception as error:
            raise MissingPluginError(f"quark.torch comes with {candidate.source}, whose import fails: {error}") from error
    raise MissingPluginError(
        "quark.torch is not active. Run: pip install quark-amd, or, if it is installed, change QUARK_DISABLED_PLUGINS or QUARK_PLUGINS"
    )


class _HandsOver:
    """A finder for modules of ``quark`` that another distribution registers."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the specification of a module from the distribution that registers it. Return None if there
        is no such distribution."""
        is_asked = name.startswith("quark.torch.") or (name.startswith("quark.") and _active())
        return _registered().find_spec(name) if is_asked else None
