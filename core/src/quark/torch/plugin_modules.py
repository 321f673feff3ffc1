"""Documented modules that belong to plugins, such as ``quark.torch.algorithm.awq.awq``: made on import, from what records export."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from quark.errors import MissingPluginError
from quark.lazy import LazyRef
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

        names: dict[str, LazyRef] = dict(documented_modules().get(module.__name__, {}))

        def find(name: str) -> object:
            if name not in names:
                raise AttributeError(f"module '{module.__name__}' has no attribute '{name}'", name=name, obj=module)
            setattr(module, name, names[name].load())
            return getattr(module, name)

        module.__doc__ = f"Documented module of plugins; it holds {', '.join(sorted(names)) or 'modules only'}."
        module.__dict__.update(__getattr__=find, __all__=sorted(names), __dir__=lambda: sorted({*vars(module), *names}))


def install() -> None:
    """Put the finder behind all others, once in a process."""
    if not any(isinstance(finder, PluginModules) for finder in sys.meta_path):
        sys.meta_path.append(PluginModules())
