"""Functions that read the options of schemes, algorithms, observers and exporters from code, and check
values.

A plugin need not declare options. The options of a scheme are the keyword arguments of its function. The
options of an algorithm are the fields of its settings, and the options of an exporter are the keyword
arguments of its class. The help texts of options come from the docstrings of the function or class
(``Args:``, ``Attributes:``). An annotation can add an `OptionNote`, as in
``share: Annotated[float, OptionNote(examples=(0.9,))] = 1.0``.

A record may declare its options (`quark.plugins.Option`), so that quark can list them without an import.
quark compares the declared options with the code when it loads the code.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from quark.base.names import closest
from quark.errors import ConfigError, QuarkError

REQUIRED: Any = inspect.Parameter.empty
"""Marker in `Option.default` for an option without a default."""

_UNIONS = (typing.Union, types.UnionType)


def _pairs(values: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    return tuple(dict(values).items())


@attrs.frozen
class OptionNote:
    """Hints for the conformance suite, which checks that every option changes a result.

    Attributes:
        examples: Values that differ from the default and change a result. Give such values if the suite
            cannot derive them from the type and the default.
        beside: Pairs of the name of another option and a value. This option has an effect only if the other
            options have these values.
        is_cost_only: Whether the option changes only speed or memory. It may then change results by rounding
            errors.
        in_checks: Value that the conformance suite uses instead of the default, for example for an algorithm
            with many steps. None if the suite uses the default. The checks of harm and ``quark check --all``
            always use the default.
    """

    examples: tuple[Any, ...] = ()
    beside: tuple[tuple[str, Any], ...] = attrs.field(default=(), converter=_pairs)
    is_cost_only: bool = False
    in_checks: Any = None


@attrs.frozen
class Option:
    """An option of a scheme, an algorithm, an observer, an exporter, a selector or a dataset.

    Attributes:
        name: Name by which a user sets the option.
        type: Annotated type of the values. If there is no annotation, it is the type of the default. If the
            default is None or missing too, it is `typing.Any`.
        default: Value of the option if a user does not set it. `REQUIRED` if a user must set it.
        help: Text about the option from the docstring, on one line.
        is_converted: Whether the function or class converts the value itself. quark then accepts values of
            all types.
        note: The `OptionNote` of the annotation. If the annotation has none, quark creates a note. Its
            examples are the values that the validator of the attrs field allows.
    """

    name: str
    type: Any = Any
    default: Any = REQUIRED
    help: str = ""
    is_converted: bool = False
    note: OptionNote = OptionNote()

    @property
    def type_text(self) -> str:
        """The type as text, in the form of an annotation, without the names of modules."""
        text = self.type.__name__ if isinstance(self.type, type) and not typing.get_args(self.type) else str(self.type)
        return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text)

    def __str__(self) -> str:
        default = "" if self.default is REQUIRED else f"={self.default!r}"
        return f"{self.name}{default} ({self.type_text})"

    def to_dict(self) -> dict[str, Any]:
        """Return the option as a dictionary of JSON values.

        A default that is no JSON value is replaced by its ``repr``.
        """
        required = self.default is REQUIRED
        default = None if required else self.default if _is_json(self.default) else repr(self.default)
        return {"name": self.name, "type": self.type_text, "default": default, "required": required, "help": self.help}


def options_of(target: Callable[..., Any], without: Iterable[str] = ()) -> tuple[Option, ...]:
    """Return the options of a function or a class, which are its keyword arguments.

    The options of an attrs class are its fields, except fields whose metadata say "legacy" or "unused".

    Args:
        target: Function or class that accepts the options.
        without: Names of arguments that are not options.
    """
    hints, helps, left_out = _hints(target), _helps(target), set(without)
    values: dict[str, tuple[Any, ...]] = {}
    if isinstance(target, type) and attrs.has(target):
        fields: Any = [f for f in attrs.fields(target) if f.init and not (f.metadata.get("legacy") or f.metadata.get("unused"))]
        arguments = [(f.name, _default(f), f.converter is not None) for f in fields]
        values = {f.name: _allowed(f.validator) for f in fields}
    else:
        plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        parameters = [p for p in inspect.signature(target).parameters.values() if p.kind in plain]
        arguments = [(p.name, p.default, False) for p in parameters]
    return tuple(
        Option(name, _plain(hint), default, helps.get(name, ""), converts, _note(hint) or OptionNote(values.get(name, ())))
        for name, default, converts in arguments
        for hint in [hints.get(name, _hint_of(default))]
        if name not in left_out
    )


def settings_options(config: type[Any]) -> tuple[Option, ...]:
    """Return the options of an algorithm. They are the fields of the algorithm's settings, except
    ``name``."""
    return options_of(config, without=("name",))


def observer_options(observer: type[Any]) -> tuple[Option, ...]:
    """Return the options of an observer: the class attributes that its attribute ``options`` lists."""
    helps, hints = _helps(observer), _hints(observer, of_attributes=True)
    values = {name: getattr(observer, name, REQUIRED) for name in getattr(observer, "options", ())}
    return tuple(
        Option(name, _hint_of(value), value, helps.get(name, ""), note=_note(hints.get(name)) or OptionNote())
        for name, value in values.items()
    )


def dataset_options(samples: Callable[..., Any]) -> tuple[Option, ...]:
    """Return the options of a source of text. They are the arguments of the function, except ``path``."""
    return options_of(samples, without=("path",))


def disagreement(declared: Sequence[Option], actual: Sequence[Option]) -> str | None:
    """Return how the declared options differ from the actual options of the code, as a verb phrase.

    The function compares names, types and defaults. Return None if all of them are equal.
    """
    by_name = {option.name: option for option in actual}
    for option in declared:
        if option.name not in by_name:
            return f"has no option '{option.name}', which its record declares"
        own = by_name.pop(option.name)
        if str(own) != str(option):
            return f"has the option {own}, which its record declares as {option}"
    return f"has the option '{min(by_name)}', which its record does not declare" if by_name else None


def checked(whose: str, known: Sequence[Option], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of options, converted to the types of the options.

    If the type of the option is float, an integer becomes a float. If the type is a tuple, a list becomes a
    tuple.

    Args:
        whose: Owner of the options, as messages name it, such as ``"the scheme 'mx6'"``.
        known: All options of the owner.
        given: Mapping from the name of an option to the value that a user gave.

    Raises:
        ConfigError: (a ValueError) An option is unknown, or a value has another type. The message lists the
            options.
    """
    by_name = {option.name: option for option in known}
    wrong = []
    for name, value in given.items():
        if name not in by_name:
            near = closest(name, by_name)
            hint = f" Did you mean '{near}'?" if near else ""
            wrong.append(f"{whose} has no option '{name}'.{hint}")
        elif not by_name[name].is_converted and not _fits(value, by_name[name].type):
            wrong.append(f"{whose} needs {by_name[name].type_text} for the option '{name}', not {value!r} ({type(value).__name__}).")
    if wrong:
        raise ConfigError(f"{' '.join(wrong)} Its options: {', '.join(map(str, known)) or 'none'}")
    return {name: _converted(value, by_name[name].type) for name, value in given.items()}


def called(whose: str, target: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Call ``target`` with the options ``given``, and return the result. `checked` must have checked the
    options.

    Raises:
        ConfigError: (a ValueError) ``target`` raises a TypeError or a ValueError.
    """
    try:
        return target(**given)
    except QuarkError:
        raise
    except (TypeError, ValueError) as error:
        # The first argument of an error from an attrs validator is the message; the others are objects.
        values = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ConfigError(f"{whose} refuses {values}: {error.args[0] if error.args else error}") from error


def _default(field: Any) -> Any:
    if field.default is attrs.NOTHING:
        return REQUIRED
    if not isinstance(field.default, attrs.Factory):  # type: ignore[arg-type]
        return field.default
    return REQUIRED if field.default.takes_self else field.default.factory()


def _hints(target: Callable[..., Any], *, of_attributes: bool = False) -> dict[str, Any]:
    is_plain = isinstance(target, type) and not attrs.has(target) and not of_attributes
    try:
        return typing.get_type_hints(target.__init__ if is_plain else target, include_extras=True)
    except Exception:  # an annotation may name a class that is imported for type checkers only
        return {}


def _plain(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


def _note(hint: Any) -> OptionNote | None:
    """Return the `OptionNote` in an annotation, or None if the annotation has none."""
    notes = (note for note in getattr(hint, "__metadata__", ()) if isinstance(note, OptionNote))
    return next(notes, None)


def _allowed(validator: Any) -> tuple[Any, ...]:
    """Return the values that a field's validator `attrs.validators.in_` allows.

    Return an empty tuple if the field has another validator or no validator.
    """
    inner = getattr(validator, "validator", validator)
    return tuple(getattr(inner, "options", ()))


def _hint_of(default: Any) -> Any:
    return Any if default is None or default is REQUIRED else type(default)


def _helps(target: Callable[..., Any]) -> dict[str, str]:
    """Return a dictionary from the name of an argument to its help text in the docstring.

    For a class, the docstrings of its base classes count too.
    """
    helps: dict[str, str] = {}
    for owner in reversed(inspect.getmro(target)) if isinstance(target, type) else (target,):
        helps |= _entries(inspect.cleandoc(owner.__doc__ or "")) if owner is not object else {}
    return helps


def _entries(doc: str) -> dict[str, str]:
    """Return the entries of the sections ``Args:`` and ``Attributes:`` of a docstring.

    The result is a dictionary from name to text. The lines of each text are joined to one line.
    """
    entries: dict[str, list[str]] = {}
    current: list[str] | None = None
    inside = False
    for line in doc.splitlines():
        heads, colon, text = line.strip().partition(": ")
        names = heads.split(", ")
        if line and not line.startswith(" "):
            inside, current = line in ("Args:", "Attributes:"), None
        elif inside and colon and all(map(str.isidentifier, names)) and len(line) - len(line.lstrip()) == 4:
            current = [text]
            entries |= dict.fromkeys(names, current)
        elif current is not None and line.strip():
            current.append(line.strip())
    return {name: " ".join(lines).replace("``", "") for name, lines in entries.items()}


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value has the type of an annotation. A list from JSON counts as a tuple.

    Return True for types that are not handled here. The function or class that gets the option checks them
    itself.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in _UNIONS:
        return any(_fits(value, one) for one in inner)
    if origin is typing.Literal:
        return value in inner
    if hint is None or hint is type(None):
        return value is None
    if hint in (bool, str):
        return isinstance(value, hint)
    if hint in (int, float):
        return isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
    container = origin or hint
    if container in (list, tuple, Sequence, Iterable):
        element = inner[0] if inner else Any
        return isinstance(value, (list, tuple)) and all(_fits(one, element) for one in value)
    if container in (dict, Mapping):
        return isinstance(value, Mapping)
    return True


def _converted(value: Any, hint: Any) -> Any:
    alternatives = typing.get_args(hint) if typing.get_origin(hint) in _UNIONS else (hint,)
    types_of_hint = {typing.get_origin(one) or one for one in alternatives}
    if isinstance(value, int) and not isinstance(value, bool) and float in types_of_hint and int not in types_of_hint:
        return float(value)
    if isinstance(value, list) and list not in types_of_hint and tuple in types_of_hint:
        return tuple(value)
    return value


def _is_json(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_json, value))
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(one) for key, one in value.items())
    return value is None or isinstance(value, (bool, int, float, str))
