"""The import finder for AMD Quark's public modules.

These modules have no source files: `quark_amd.import_paths` and the exports of plugins define their names.
`quark.torch` finds this module through the entry point of quark-amd.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from quark.errors import MissingPluginError, UnknownNameError
from quark_amd.absent import refuse_absent, refuse_absent_module
from quark_amd.import_paths import IN_EXAMPLES, NAMES, WITH_NAMES_OF_PLUGINS

if TYPE_CHECKING:
    from quark.base.lazy import Reference
    from quark.plugins.registry import Registered

__all__ = ["PublicModules", "find_spec", "load", "public_names"]

_BY_PLUGINS = ("quark.torch.", "quark.experimental")
"""Prefixes of module names that plugins may provide."""
_OWN = {*NAMES, *IN_EXAMPLES}
_PACKAGES = {name.rsplit(".", count)[0] for name in _OWN for count in range(1, name.count("."))}


def load(module: str, name: str) -> Any:
    """Return the object ``name`` of a public module. The module's ``__getattr__`` calls this function.

    The module caches the object.

    Raises:
        AttributeError: The module has no such name.
        MissingPluginError: (an ImportError) The name does not exist, and a distribution of this project that
            may define it is not active. The message states the fix.
        NotOfferedError: (an ImportError) The program imports a name that AMD Quark has, but this project does
            not. The message names a replacement.
    """
    if name == "__all__":
        return public_names(module)
    if (reference := NAMES.get(module, {}).get(name)) is not None:
        from quark.base.lazy import LazyRef  # not above, so that `import quark` stays fast

        value = LazyRef(reference).load()
    elif name.startswith("_"):
        raise _no_attribute(module, name)
    elif module in IN_EXAMPLES and hasattr(_example(module), name):
        value = getattr(_example(module), name)
    else:
        refuse_absent(module, name)
        value = _of_a_plugin(module, name)
    setattr(sys.modules[module], name, value)
    return value


def public_names(module: str) -> list[str]:
    """Return the sorted names of a public module. The ``__dir__`` and ``__all__`` of the module use them."""
    names = {name for name in NAMES.get(module, ()) if not name.startswith("_")}
    if module in IN_EXAMPLES:
        names |= set(_example(module).__all__)
    if module in WITH_NAMES_OF_PLUGINS:
        names |= {name for module, name in _exports() if not module}
    elif module.startswith(_BY_PLUGINS):
        exported = _modules_of_plugins()
        below = (known.removeprefix(f"{module}.") for known in exported if known.startswith(f"{module}."))
        names |= {*exported.get(module, ()), *(known.partition(".")[0] for known in below)}
    return sorted(names)


def refuse_incomplete(name: str) -> None:
    """Raise an error if ``name`` may be unknown only because a distribution of this project is not active.

    Raises:
        MissingPluginError: (an ImportError) A distribution is not installed, an environment variable leaves
            its plugin out, or its plugin failed.
    """
    from quark.plugins.catalog import catalog
    from quark.plugins.registries import BUILT_IN

    failures = [str(failure) for failure in catalog().failures() if failure.source.distribution in BUILT_IN]
    if reasons := [*filter(None, [catalog().missing()]), *failures]:
        raise MissingPluginError(f"no active plugin provides {name}. {' '.join(reasons)} (`quark plugins` lists active and failed plugins)")


def _of_a_plugin(module: str, name: str) -> Any:
    """Return the object that a plugin provides under the public name ``name``, or the public submodule of
    this name.

    This function raises the same errors as `load`.
    """
    near = None
    if module in WITH_NAMES_OF_PLUGINS:
        from quark.base.names import closest
        from quark.plugins import documented_object

        try:
            return documented_object(name)
        except UnknownNameError:
            refuse_incomplete(f"{module}.{name}")
        by_lower_case = {other.lower(): other for other in public_names(module)}
        near = by_lower_case.get(closest(name, by_lower_case) or "")
    exported = _modules_of_plugins() if module.startswith(_BY_PLUGINS) else {}
    if (reference := exported.get(module, {}).get(name)) is not None:
        return reference.load()
    below = f"{module}.{name}"
    if below in _OWN | _PACKAGES or any(f"{known}.".startswith(f"{below}.") for known in exported):
        return import_module(below)
    raise _no_attribute(module, name, f"; did you mean '{near}'?" if near else "")


def _modules_of_plugins() -> Mapping[str, Mapping[str, Reference]]:
    """Return the modules that plugins provide, as a dictionary from module to a dictionary from name to
    reference.

    A name is left out if several records use it for different objects.
    """
    modules: dict[str, dict[str, Reference]] = {}
    for (module, name), references in _exports().items():
        if module and len(references) == 1:
            modules.setdefault(module, {}).update(dict.fromkeys([name], *references))
    return modules


def _exports() -> dict[tuple[str, str], set[Reference]]:
    """Return the exports of plugins in sorted order, as a dictionary from (module, name) to references.

    For a name that is exported without a module, the module in the key is an empty string.
    """
    from quark.plugins.catalog import catalog  # plugins are read only when their names are asked for
    from quark.plugins.registry import unreplaced

    claims: dict[str, list[Registered]] = {}
    for registry in catalog().registries.values():
        for claim in registry.claims():
            for key in claim.record.exports:
                claims.setdefault(key, []).append(claim)
    return {
        (module, name): {claim.record.exports[key] for claim in unreplaced(claims[key])}
        for key in sorted(claims)
        for module, _, name in [key.rpartition(":")]
    }


def _example(module: str) -> ModuleType:
    """Return the module of the example scripts that implements a public module.

    Raise MissingPluginError if the example scripts are not installed.
    """
    target = IN_EXAMPLES[module]
    if importlib.util.find_spec(target.partition(".")[0]) is None:
        raise MissingPluginError(
            f"{module} is part of AMD Quark's example scripts, not of quark-amd: pip install examples/from_amd_quark from this project's "
            f"repository",
            name=module,
        )
    return import_module(target)


def _no_attribute(module: str, name: str, hint: str = "") -> AttributeError:
    return AttributeError(f"module '{module}' has no attribute '{name}'{hint}", name=name, obj=sys.modules.get(module))


def find_spec(name: str) -> ModuleSpec | None:
    """Return the specification of a public module, or None if there is no such module.

    Raises:
        MissingPluginError: (an ImportError) The module does not exist, and the cause may be that a
            distribution of this project is not active.
        NotOfferedError: (an ImportError) AMD Quark has the module, but this project does not. The message
            names a replacement.
    """
    if name not in _OWN | _PACKAGES:
        may_be_a_plugins = name.startswith(_BY_PLUGINS)
        if not may_be_a_plugins or not any(f"{known}.".startswith(f"{name}.") for known in _modules_of_plugins()):
            if may_be_a_plugins:
                refuse_incomplete(name)
            refuse_absent_module(name)
            return None
    loader: Any = PublicModules()  # not a subclass, to avoid the import of importlib.abc
    return ModuleSpec(name, loader, is_package=name in _PACKAGES or name not in IN_EXAMPLES)


class PublicModules:
    """Loader of the public modules."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None, so that Python creates the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Add functions to a new module. They load a name when a program accesses the name."""
        name = module.__name__
        module.__doc__ = f"AMD Quark's public module `{name}`: its names are objects of this project and of plugins."
        module.__dict__.update(__getattr__=lambda attribute: load(name, attribute), __dir__=lambda: public_names(name))

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of a public module that is a program, so that ``python -m`` can run it.

        Return None if the module is not a program.
        """
        if fullname not in IN_EXAMPLES:
            return None
        loader: Any = importlib.util.find_spec(_example(fullname).__name__).loader  # type: ignore[union-attr]  # it is imported
        return loader.get_code(IN_EXAMPLES[fullname])
