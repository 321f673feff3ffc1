"""The catalogue: every check by its id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType

from quark.testing.check import Check
from quark.testing.subject import KINDS

__all__ = ["all_checks", "checks_of"]


@cache
def all_checks() -> Mapping[str, Check]:
    """Return all checks by id, kind by kind, in the order in which they are defined. The first call imports torch."""
    return MappingProxyType({check.id: check for kind in KINDS for check in _defined_in(kind)})


def checks_of(kind: str) -> tuple[Check, ...]:
    """Return the checks of one kind of subject, without importing those of the others."""
    return tuple(_defined_in(kind))


def _defined_in(kind: str) -> Iterator[Check]:
    """Yield the checks of a kind: those of the module of the same name in `quark.testing.checks`, or in the modules of its folder."""
    module = import_module(f"quark.testing.checks.{kind}")
    parts = [module, *(import_module(f"{module.__name__}.{name}") for name in getattr(module, "PARTS", ()))]
    for part in parts:
        for value in vars(part).values():
            if isinstance(value, Check):
                if value.kind != kind:
                    raise ValueError(f"the check {value.id} is defined in {part.__name__}, which holds checks of the kind '{kind}'")
                yield value
