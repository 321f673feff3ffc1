"""Documented modules that belong to plugins, such as ``quark.torch.algorithm.awq.awq``: made on import, from what records export."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from quark.errors import MissingPluginError
from quark.lazy import Reference
from quark.torch.documented import is_active

PREFIX = "quark.torch."
_ALGORITHMS = "quark.torch.algorithm."
_ALGORITHM_DISTRIBUTION = "quark-algos"


class PluginModules(MetaPathFinder, Loader):
    """Finds modules below `PREFIX` that no file of the core is; it comes last, so files win."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not fullname.startswith(PREFIX):
            return None
        from quark.plugins import documented_modules  # read only when such a module is imported

        known = documented_modules()
        package = any(name.startswith(f"{fullname}.") for name in known)
        if package or fullname in known:
            return ModuleSpec(fullname, self, is_package=package)
        if fullname.startswith(_ALGORITHMS) and not is_active(_ALGORITHM_DISTRIBUTION):
            raise MissingPluginError(
                f"{fullname} is brought by the distribution '{_ALGORITHM_DISTRIBUTION}', which is not installed or not active: "
                f"pip install {_ALGORITHM_DISTRIBUTION} (`quark plugins` lists what is active and what failed)",
            )
        return None

    def exec_module(self, module: ModuleType) -> None:
        from quark.plugins import documented_modules

        known = documented_modules()
        names: dict[str, Reference] = dict(known.get(module.__name__, {}))
        below = {name.removeprefix(f"{module.__name__}.").partition(".")[0] for name in known if name.startswith(f"{module.__name__}.")}

        def find(name: str) -> object:
            if name in names:
                setattr(module, name, names[name].load())
            elif name in below:
                # A module below a made package is there without being imported by name.
                setattr(module, name, import_module(f"{module.__name__}.{name}"))
            else:
                raise AttributeError(f"module '{module.__name__}' has no attribute '{name}'", name=name, obj=module)
            return getattr(module, name)

        public = sorted(below | set(names))
        module.__doc__ = f"Documented module of plugins; it holds {', '.join(public)}."
        module.__dict__.update(__getattr__=find, __all__=public, __dir__=lambda: sorted({*vars(module), *public}))


def install() -> None:
    """Put the finder behind all others, once in a process."""
    if not any(isinstance(finder, PluginModules) for finder in sys.meta_path):
        sys.meta_path.append(PluginModules())
