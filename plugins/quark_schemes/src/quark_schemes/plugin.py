"""The plugin of quark-schemes: records of number formats, observers and schemes.

The module imports no torch, since records name their code as text.
"""

from __future__ import annotations

from collections.abc import Iterable

from quark.plugins import FormatRecord, ObserverRecord, SchemeRecord, hookimpl
from quark_schemes.registered_formats import FORMATS
from quark_schemes.registered_observers import OBSERVERS
from quark_schemes.registered_schemes import SCHEMES

__all__ = ["QUARK_API", "quark_register_formats", "quark_register_observers", "quark_register_schemes"]

QUARK_API = (2, 2)
"""Supported versions of the plugin API."""


@hookimpl
def quark_register_formats() -> Iterable[FormatRecord]:
    """Return the records of number formats, with the public classes that build their configurations."""
    return FORMATS


@hookimpl
def quark_register_observers() -> Iterable[ObserverRecord]:
    """Return the records of observers, under their public class names."""
    return OBSERVERS


@hookimpl
def quark_register_schemes() -> Iterable[SchemeRecord]:
    """Return the records of schemes."""
    return SCHEMES
