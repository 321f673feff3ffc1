"""Expected: the kind of object that a reference of a record must lead to.

The object is compared when the reference is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from quark.base.lazy import LazyRef
from quark.plugins.options import Option, disagreement

if TYPE_CHECKING:
    from quark.plugins.records import Record

KEY = "leads_to"
"""Key in the metadata of a record's field that holds its `Expected`."""


@attrs.frozen
class Expected:
    """The kind of object that one reference must lead to.

    Attributes:
        form: ``"value"``: an instance of ``base``; ``"class"``: a subclass of it; ``"function"``: any
            callable.
        base: Reference to that class, loaded only for a comparison.
        members: Methods that a class must have. The caller of a function checks its result.
        agrees: Field of the record → attribute of the object (dotted), which must be equal.
        options: Returns the options of the object, which must agree with the options that the record
            declares; None if the object has none.
    """

    form: str
    base: LazyRef | None = None
    members: tuple[str, ...] = ()
    agrees: Mapping[str, str] = attrs.field(factory=dict, hash=False)
    options: Callable[[Any], tuple[Option, ...]] | None = None

    def complaint(self, record: Record, target: object) -> str | None:
        """Return why the object of a reference of ``record`` is wrong, as a verb phrase, or None."""
        complaint = self._wrong_form(target) or lacking(target, self.members) or self._disagreement(record, target)
        if complaint is None and self.options is not None and record.options is not None:
            return disagreement(record.options, self.options(target))
        return complaint

    def _wrong_form(self, target: object) -> str | None:
        if self.form == "function":
            return None if callable(target) else f"is {described(target)} instead of a callable"
        base: Any = self.base.load() if self.base is not None else object
        if self.form == "class":
            fits = isinstance(target, type) and issubclass(target, base)
            return None if fits else f"is {described(target)} instead of a subclass of {base.__module__}.{base.__qualname__}"
        if isinstance(target, base):
            return None
        fix = f": write {target.__name__}(…)" if isinstance(target, type) and issubclass(target, base) else ""
        return f"is {described(target)} instead of a value of {base.__module__}.{base.__qualname__}{fix}"

    def _disagreement(self, record: Record, target: object) -> str | None:
        for field, path in self.agrees.items():
            value, own = getattr(record, field), _attribute(target, path)
            allowed = (value, *record.aliases) if field == "name" else (value,)
            if own is not attrs.NOTHING and own not in allowed:
                return f"says {path}={own!r}, but its record says {field}={value!r}: make them equal"
        return None


def lacking(target: object, members: tuple[str, ...]) -> str | None:
    """Return, as a verb phrase, which members an object lacks, or None. Functions are not checked."""
    if not isinstance(target, type) and hasattr(target, "__code__"):
        return None
    absent = [name for name in members if not hasattr(target, name)]
    return f"has no {' and no '.join(repr(name) for name in absent)}" if absent else None


def described(target: object) -> str:
    """Return a short description of an object."""
    if target is None:
        return "None"
    return f"the class {target.__name__}" if isinstance(target, type) else f"a {type(target).__name__}"


def _attribute(target: Any, path: str) -> Any:
    """Return an attribute; for a path ``"field.default"``, the default of an attrs field."""
    first, _, rest = path.partition(".")
    if rest == "default":
        field = attrs.fields_dict(target).get(first) if attrs.has(target) else None
        return attrs.NOTHING if field is None else field.default
    return getattr(target, first, None)
