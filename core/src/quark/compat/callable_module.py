"""Packages of the core that share their name with a registry: ``quark.templates`` is a package, ``quark.templates()`` the registry."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["make_callable"]


def make_callable(module: str, call: Callable[[], Any]) -> None:
    """Make the imported module ``module`` answer calls with ``call()``.

    ``import quark.templates`` binds that package to ``quark.templates``, in front of the registry function of the same name; so the package
    itself has to be callable. Python allows to replace a module's class (data model, "Customizing module attribute access").
    """

    class CallableModule(ModuleType):
        """A module that can be called."""

        def __call__(self) -> Any:
            return call()

    sys.modules[module].__class__ = CallableModule
