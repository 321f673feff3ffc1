"""quark: post-training quantization in which everything that varies is a plugin.

``import quark`` is light. What is registered: ``quark.schemes()``, ``formats()``, ``observers()``, ``algorithms()``, ``templates()``,
``exporters()``; each a registry with ``names()``, ``get()``, ``conflicts()``, ``failures()``. The documented interface is ``quark.torch``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quark.version import VERSION as __version__

if TYPE_CHECKING:
    from quark.plugins import algorithms, exporters, formats, observers, schemes, templates

_REGISTRIES = ("algorithms", "exporters", "formats", "observers", "schemes", "templates")

__all__ = ["__version__", "algorithms", "exporters", "formats", "observers", "schemes", "templates"]


def __getattr__(name: str) -> Any:
    # pluggy and the metadata of installed distributions are read when a registry is first asked for.
    if name in _REGISTRIES:
        from quark import plugins

        return getattr(plugins, name)
    raise AttributeError(f"module 'quark' has no attribute {name!r}")
