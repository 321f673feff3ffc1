"""How documented names are found on first use: those of the core's heavy rooms by a table, those of plugins by what records export."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from quark.errors import MissingPluginError, UnknownNameError
from quark.lazy import LazyRef
from quark.names import closest

_OWNERS = {
    "Spec": "quark-schemes",
    "Observer": "quark-schemes",
    "Scheme": "quark-schemes",
    "Config": "quark-algos",
    "Processor": "quark-algos",
}
"""Which distribution of this project brings documented names that end so."""


_MACHINERY = {"Any", "TYPE_CHECKING", "annotations", "documented_name", "documented_names"}
"""What façade modules import for their own use."""


def documented_name(module: str, name: str, table: Mapping[str, str], *, plugins: bool = False) -> Any:
    """What ``module.name`` is; the module keeps it for the next time.

    Args:
        module: Full name of a documented module.
        name: An attribute that is not in its namespace yet.
        table: Names of the core's own, ``"module:attr"`` by name.
        plugins: Whether plugins' names are found in this module too.

    Raises:
        AttributeError: There is no such documented name.
        MissingPluginError: (an ImportError) It belongs to a plugin that is not installed or not active; the message says what to install.
    """
    if name == "__all__":
        return documented_names(module, table, plugins=plugins)
    if name in table:
        found = LazyRef(table[name]).load()
    elif plugins and not name.startswith("_"):
        found = plugin_object(module, name)
    else:
        raise AttributeError(f"module '{module}' has no attribute '{name}'", name=name, obj=sys.modules.get(module))
    setattr(sys.modules[module], name, found)
    return found


def documented_names(module: str, table: Mapping[str, str], *, plugins: bool = False) -> list[str]:
    """All public names of a documented module: its own, the table's, and what installed plugins export."""
    own = {name for name in vars(sys.modules[module]) if not name.startswith("_") and f"{module}.{name}" not in sys.modules}
    return sorted((own | set(table) | set(_exports() if plugins else ())) - _MACHINERY)


def plugin_object(module: str, name: str) -> Any:
    """What plugins export as ``name``; raises as `documented_name` does."""
    from quark.plugins import documented_object  # the registries are read only when a plugin's name is asked for

    try:
        return documented_object(name)
    except UnknownNameError:
        pass
    owner = next((distribution for suffix, distribution in _OWNERS.items() if name.endswith(suffix) and name != suffix), None)
    if owner is not None and not is_active(owner):
        raise MissingPluginError(
            f"{module}.{name} is brought by the distribution '{owner}', which is not installed or not active: pip install {owner} "
            "(`quark plugins` lists what is active and what failed)"
        )
    known = {other.lower(): other for other in documented_names(module, {}, plugins=True)}
    near = closest(name, known)
    hint = f"; did you mean '{known[near]}'?" if near else ""
    raise AttributeError(f"module '{module}' has no attribute '{name}'{hint}", name=name, obj=sys.modules.get(module))


def is_active(distribution: str) -> bool:
    """Whether a plugin of that distribution was found and imported."""
    from quark.plugins.catalog import catalog

    return any(source.distribution == distribution for source in catalog().sources())


def _exports() -> list[str]:
    """Plain names that plugins' records export."""
    from quark.plugins.catalog import catalog

    return catalog().documented_names()
