"""References to code.

A `LazyRef` imports nothing until it is loaded. An `ObjectRef` refers to an existing object.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import attrs

_GRAMMAR = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@attrs.frozen
class LazyRef:
    """A reference that names an object by its module and attribute. `load` imports the module.

    Example:
        >>> LazyRef("json:dumps").load()([1])
        '[1]'

    Raises:
        ValueError: The target is not of the form ``"module:attr"``.
    """

    target: str = attrs.field()

    @target.validator
    def _check(self, _: Any, value: object) -> None:
        if not isinstance(value, str) or not _GRAMMAR.fullmatch(value):
            raise ValueError(f"a lazy reference is written 'package.module:attribute', not {value!r}")

    @property
    def module(self) -> str:
        """The dotted name of the module."""
        return self.target.partition(":")[0]

    @property
    def attribute(self) -> str:
        """The attribute's dotted name inside the module."""
        return self.target.partition(":")[2]

    def load(self) -> Any:
        """Import the module with `imported`, and return the object.

        Raises:
            ImportError: The module cannot be imported.
            AttributeError: The module has no such attribute.
        """
        target: Any = imported(self.module)
        first, *others = self.attribute.split(".")
        with nullcontext() if first in vars(target) else _state_of_a_fresh_process():  # its __getattr__ may import another module
            target = getattr(target, first)
        for part in others:
            target = getattr(target, part)
        return target

    def __str__(self) -> str:
        return self.target


def imported(module: str) -> ModuleType:
    """Import a module under torch's default state, even if the caller has set another default device or
    dtype.

    A plugin's module may first be imported while transformers builds a model on the meta device in bfloat16.
    Without this function, tensors that such a module creates would be meta tensors in bfloat16 until the
    process ends.

    Raises:
        ImportError: The module cannot be imported.
    """
    with nullcontext() if module in sys.modules else _state_of_a_fresh_process():
        return importlib.import_module(module)


def _state_of_a_fresh_process() -> AbstractContextManager[None]:
    if "torch" not in sys.modules:
        return nullcontext()
    from quark.base.torch_state import plain_torch_state

    return plain_torch_state()


@attrs.frozen(eq=False)
class ObjectRef:
    """A reference to an object that already exists. It has the interface of `LazyRef`.

    Example:
        >>> ObjectRef([1]).load()
        [1]
    """

    target: Any

    def load(self) -> Any:
        """Return the object."""
        return self.target

    def __str__(self) -> str:
        return f"a {type(self.target).__name__} of this program"


Reference = LazyRef | ObjectRef


def as_reference(value: str | Reference) -> Reference:
    """Convert a string ``"module:attr"`` to a `LazyRef`. Return a reference unchanged."""
    return value if isinstance(value, (LazyRef, ObjectRef)) else LazyRef(value)


def as_optional_reference(value: str | Reference | None) -> Reference | None:
    """Return None for None, and otherwise the result of `as_reference`."""
    return None if value is None else as_reference(value)


def make_callable(module: str, call: Callable[[], Any]) -> None:
    """Make the imported module ``module`` callable. A call of the module returns ``call()``.

    ``quark.algorithms`` is a function that returns a registry. After ``import quark.algorithms``, the same
    name refers to the package, so a call of the package must do the same as the function. Python allows a
    program to replace the class of a module (data model, "Customizing module attribute access").
    """

    class CallableModule(ModuleType):
        """A module that can be called."""

        def __call__(self) -> Any:
            return call()

    sys.modules[module].__class__ = CallableModule
