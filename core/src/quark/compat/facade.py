"""Facade: the names of one of AMD Quark's public modules that are loaded on first use, from the core or from plugins."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from quark.compat.absent import refuse_absent
from quark.errors import MissingPluginError, UnknownNameError
from quark.lazy import LazyRef
from quark.names import closest

__all__ = ["Facade"]


@attrs.frozen
class Facade:
    """The public names of one module.

    Attributes:
        module: Full name of the module.
        own: Names that its file defines.
        lazy: Names of the core that would import torch: ``"module:attribute"`` by name.
        private: As ``lazy``, of names that are not listed.
        plugins: Whether the module also has the names that plugins' records export.
    """

    module: str
    own: Sequence[str] = ()
    lazy: Mapping[str, str] = attrs.field(factory=dict)
    private: Mapping[str, str] = attrs.field(factory=dict)
    plugins: bool = False

    def load(self, name: str) -> Any:
        """Return the object of that name, for the module's ``__getattr__``; the module keeps it for the next time.

        Raises:
            AttributeError: There is no such name.
            MissingPluginError: (an ImportError) There is none, and a distribution of this project is not active; says what to do.
            NotOfferedError: (an ImportError) AMD Quark has one, and it does not come here; says what to use.
        """
        if name == "__all__":
            return self.names()
        references = {**self.lazy, **self.private}
        if name in references:
            value = LazyRef(references[name]).load()
        else:
            refuse_absent(self.module, name)
            if not self.plugins or name.startswith("_"):
                raise self._no_attribute(name)
            value = self._of_a_plugin(name)
        setattr(sys.modules[self.module], name, value)
        return value

    def names(self) -> list[str]:
        """Return all public names, sorted, for the module's ``__dir__`` and ``__all__``."""
        from quark.plugins import documented_names  # plugins are read only when their names are asked for

        return sorted({*self.own, *self.lazy, *(documented_names() if self.plugins else ())})

    def _of_a_plugin(self, name: str) -> Any:
        from quark.plugins import documented_object

        try:
            return documented_object(name)
        except UnknownNameError:
            refuse_incomplete(f"{self.module}.{name}")
        by_lower_case = {other.lower(): other for other in self.names()}
        near = closest(name, by_lower_case)
        raise self._no_attribute(name, f"; did you mean '{by_lower_case[near]}'?" if near else "")

    def _no_attribute(self, name: str, hint: str = "") -> AttributeError:
        return AttributeError(f"module '{self.module}' has no attribute '{name}'{hint}", name=name, obj=sys.modules.get(self.module))


def refuse_incomplete(name: str) -> None:
    """Refuse a name that nothing brings where a distribution of this project is not active, which may be why.

    Raises:
        MissingPluginError: (an ImportError) A distribution is not installed, a variable leaves its plugin out, or its plugin failed.
    """
    from quark.plugins.catalog import catalog
    from quark.plugins.kinds import BUILT_IN

    failures = [str(failure) for failure in catalog().failures() if failure.source.distribution in BUILT_IN]
    if reasons := [*filter(None, [catalog().missing()]), *failures]:
        raise MissingPluginError(
            f"no active plugin brings {name}. {' '.join(reasons)} (`quark plugins` lists what is active and what failed)"
        )
