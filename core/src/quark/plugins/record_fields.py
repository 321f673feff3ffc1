"""Converters and validators for fields of records, and `Expected`, which checks the target of a reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs

from quark.base.lazy import LazyRef, Reference, as_reference
from quark.base.names import NAME_RULE, closest, is_valid_name, is_vendor_name
from quark.plugins.options import Option, disagreement

if TYPE_CHECKING:
    from quark.plugins.records import Record

CAPABILITIES: Mapping[str, str] = MappingProxyType(
    {
        "calibration": "algorithms: it measures the inputs of layers, so a run needs calibration data",
        "graphs": "exporters: it writes models quantized in FX graph mode, which have operators instead of layers",
        "resumable": "exporters: a run that was killed continues after the decoder blocks that it has written",
        "rounds_scales": "exporters: it stores scales in a format that rounds some of them",
        "streaming": "exporters: it writes one decoder block at a time, so the model need not fit in memory",
        "tokenizer_inside": "exporters: it writes the tokenizer into its own file, and not beside the weights",
        "zero_point": "formats: it has zero points, so a range may be asymmetric",
    }
)
"""The capabilities that quark defines. The text says which kind of record may have one, and what it means."""


def check_name(_: Any, attribute: Any, value: Any) -> None:
    """Check that a value is a name. Like all checks in this module, raise ValueError if it is not."""
    if not is_valid_name(value):
        raise ValueError(f"{attribute.name} {value!r} is not a name: a name is {NAME_RULE}")


check_names = attrs.validators.deep_iterable(check_name)
"""Checks that all values are names."""


def check_run_time_name(_: Any, attribute: Any, value: Any) -> None:
    """Check that a value can be the name of a record that a program registers for itself."""
    if not isinstance(value, str) or not value.strip() or ":" in value:
        raise ValueError(f"{attribute.name} {value!r} is not a name: write a text without ':', which separates distribution and name")


def check_module(_: Any, attribute: Any, value: Any) -> None:
    """Check that a value names a module."""
    if not isinstance(value, str) or not all(part.isidentifier() for part in value.split(".")):
        raise ValueError(f"{attribute.name} {value!r} is not the name of a module: write 'package.module'")


def as_strings(values: Iterable[str]) -> tuple[str, ...]:
    """Return a tuple of the strings. Raise ValueError for a single string."""
    if isinstance(values, str):
        raise ValueError(f"{values!r} is one string instead of several: write ({values!r},)")
    return tuple(values)


def as_capabilities(values: Iterable[str]) -> frozenset[str]:
    """Return a set of the capabilities."""
    return frozenset(as_strings(values))


def check_capabilities(_: Any, attribute: Any, values: frozenset[str]) -> None:
    """Check that all values are capabilities."""
    unknown = [name for name in sorted(values, key=str) if name not in CAPABILITIES and not is_vendor_name(name)]
    if unknown:
        near = closest(str(unknown[0]), CAPABILITIES)
        suggestion = f"; did you mean {near!r}?" if near else "."
        known = f"There are {', '.join(CAPABILITIES)}, and a vendor's own, 'vendor.name'"
        raise ValueError(f"{attribute.name}: {unknown[0]!r} is not a capability{suggestion} {known}")


def as_optional_tuple(values: Iterable[Option] | None) -> tuple[Option, ...] | None:
    """Return a tuple of the values, or None."""
    return None if values is None else tuple(values)


def check_options(record: Any, attribute: Any, values: tuple[Option, ...]) -> None:
    """Check that each option is an `Option`, that all names differ, and that this kind of record may have
    options."""
    expected = [field.metadata[KEY] for field in attrs.fields(type(record)) if KEY in field.metadata]
    if values and not any(one.options for one in expected):
        raise ValueError(f"a {type(record).__name__} has no options: leave {attribute.name} out")
    if wrong := [value for value in values if not isinstance(value, Option)]:
        raise ValueError(f"{attribute.name} contains {wrong[0]!r}: write Option(name, type, default, help)")
    names = [option.name for option in values]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{attribute.name} contains the option '{twice[0]}' twice: leave one out")


def as_exports(values: Mapping[str, str | Reference]) -> Mapping[str, Reference]:
    """Return a read-only mapping from public names to references."""
    return MappingProxyType({key: as_reference(ref) for key, ref in dict(values).items()})


def as_marks(values: Mapping[str, str]) -> Mapping[str, str]:
    """Return a read-only copy of the mapping."""
    return MappingProxyType(dict(values))


def check_reasons(_: Any, attribute: Any, values: Mapping[str, str]) -> None:
    """Check that the mapping gives a reason for each name. A reason is a text that is not empty."""
    for name, reason in values.items():
        if not isinstance(reason, str) or not reason.strip():
            raise ValueError(f"{attribute.name} gives no reason for '{name}': write why, as in {{'{name}': 'it has no scales'}}")


def value_reference(base: str, **agrees: str) -> Mapping[str, Expected]:
    """Return metadata for a field that refers to an instance of ``base``. `Expected` documents ``agrees``."""
    return {KEY: Expected("value", LazyRef(base), agrees=agrees)}


def class_reference(base: str, options: Callable[[Any], tuple[Option, ...]] | None = None, **agrees: str) -> Mapping[str, Expected]:
    """Return metadata for a field that refers to a subclass of ``base``. `Expected` documents the
    arguments."""
    return {KEY: Expected("class", LazyRef(base), agrees=agrees, options=options)}


def function_reference(*members: str, options: Callable[[Any], tuple[Option, ...]] | None = None) -> Mapping[str, Expected]:
    """Return metadata for a field that refers to a function, or to a class with the methods ``members``."""
    return {KEY: Expected("function", members=members, options=options)}


KEY = "leads_to"
"""Key of the `Expected` in the metadata of a record's field."""


@attrs.frozen
class Expected:
    """The kind of object that one reference must lead to.

    Attributes:
        form: ``"value"`` for an instance of ``base``, ``"class"`` for a subclass of ``base``, or
            ``"function"`` for any callable.
        base: Reference to a class. The class is loaded only when an object is checked. None for a function.
        members: Names of methods. If the object is a class, it must have these methods. If the object is a
            function, the methods are not checked.
        agrees: Mapping from a field of the record to an attribute of the object. The field and the attribute
            must have the same value. ``"field.default"`` means the default of an attrs field.
        options: Function that returns the options of the object. If the record declares options, they must
            agree with the options of the object. None if the object has no options.
    """

    form: str
    base: LazyRef | None = None
    members: tuple[str, ...] = ()
    agrees: Mapping[str, str] = attrs.field(factory=dict, hash=False)
    options: Callable[[Any], tuple[Option, ...]] | None = None

    def complaint(self, record: Record, target: object) -> str | None:
        """Return why ``target``, to which ``record`` refers, is not the expected object, as a verb phrase.

        Return None if it is the expected object.
        """
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
    """Return which of the methods ``members`` are missing in ``target``, as a verb phrase.

    Return None if ``target`` has all of them, or if ``target`` is a function.
    """
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
    """Return the attribute ``path`` of an object, or None if there is no such attribute.

    For a path ``"field.default"``, return the default of the attrs field, or NOTHING if the field is absent.
    """
    first, _, rest = path.partition(".")
    if rest == "default":
        field = attrs.fields_dict(target).get(first) if attrs.has(target) else None
        return attrs.NOTHING if field is None else field.default
    return getattr(target, first, None)
