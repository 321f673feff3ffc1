"""LazyRef: a pointer to code, ``"module:attr"``, that imports nothing until it is loaded."""

from __future__ import annotations

import importlib
import re
from typing import Any

import attrs

_GRAMMAR = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@attrs.frozen
class LazyRef:
    """A reference to an object by module and attribute, loaded on demand.

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
        """The module's dotted name."""
        return self.target.partition(":")[0]

    @property
    def attribute(self) -> str:
        """The attribute's dotted name inside the module."""
        return self.target.partition(":")[2]

    def load(self) -> Any:
        """Import the module and return the object.

        Raises:
            ImportError: The module cannot be imported.
            AttributeError: The module has no such attribute.
        """
        found: Any = importlib.import_module(self.module)
        for part in self.attribute.split("."):
            found = getattr(found, part)
        return found

    def __str__(self) -> str:
        return self.target


def as_lazy_ref(value: str | LazyRef) -> LazyRef:
    """Convert ``"module:attr"`` to a LazyRef; leave a LazyRef as it is."""
    return value if isinstance(value, LazyRef) else LazyRef(value)


def as_optional_lazy_ref(value: str | LazyRef | None) -> LazyRef | None:
    """As `as_lazy_ref`, with None passed through."""
    return None if value is None else as_lazy_ref(value)
