"""AMD Quark's public modules without a file, such as ``quark.torch.algorithm.awq.awq``: created on import of what records export."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType

from quark.compat.absent import refuse_absent
from quark.compat.facade import refuse_incomplete
from quark.lazy import LazyRef, Reference

__all__ = ["PREFIXES", "PluginModules", "install"]

PREFIXES = ("quark.torch.", "quark.experimental")
_OWN: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"quark.torch.quantization.utils": MappingProxyType({"RuntimeOptions": "quark.torch.not_offered:RuntimeOptions"})}
)
"""Public modules that hold nothing but names of other modules of the core: ``"module:attribute"`` by name."""


def _known() -> dict[str, Mapping[str, Reference]]:
    """Return the names of all such modules, of the core and of plugins, with where they are."""
    from quark.plugins import documented_modules  # plugins are read only when such a module is imported

    known: dict[str, Mapping[str, Reference]] = {**documented_modules()}
    for module, names in _OWN.items():
        known[module] = {**{name: LazyRef(reference) for name, reference in names.items()}, **known.get(module, {})}
    return known


class PluginModules(MetaPathFinder, Loader):
    """Finds modules below `PREFIXES` that are no files of the core; it comes behind files, so these win."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not fullname.startswith(PREFIXES):
            return None
        known = _known()
        is_package = any(name.startswith(f"{fullname}.") for name in known)
        if not is_package and fullname not in known:
            refuse_incomplete(fullname)
            return None
        return ModuleSpec(fullname, self, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        known = _known()
        references = dict(known.get(module.__name__, {}))
        prefix = f"{module.__name__}."
        submodules = {name.removeprefix(prefix).partition(".")[0] for name in known if name.startswith(prefix)}

        def load(name: str) -> object:
            if name in references:
                setattr(module, name, references[name].load())
            elif name in submodules:
                # A module below a package of this kind is there without being imported by name.
                setattr(module, name, import_module(prefix + name))
            else:
                refuse_absent(module.__name__, name)
                raise AttributeError(f"module '{module.__name__}' has no attribute '{name}'", name=name, obj=module)
            return getattr(module, name)

        public = sorted(submodules | set(references))
        module.__doc__ = f"Public module of plugins; it holds {', '.join(public)}."
        module.__dict__.update(__getattr__=load, __all__=public, __dir__=lambda: sorted({*vars(module), *public}))


def install() -> None:
    """Put the finder behind those of files, once in a process."""
    if not any(isinstance(finder, PluginModules) for finder in sys.meta_path):
        sys.meta_path.append(PluginModules())
