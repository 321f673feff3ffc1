"""The plugin of quark-schemes, with its records of number formats, observers and schemes.

The module does not import torch: a record names its code in a string, and quark imports the code on first
use.
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
    """Return the records of number formats. A record also names the ``*Spec`` classes of the format."""
    return FORMATS


@hookimpl
def quark_register_observers() -> Iterable[ObserverRecord]:
    """Return the records of observers, which have the names of public classes."""
    return OBSERVERS


@hookimpl
def quark_register_schemes() -> Iterable[SchemeRecord]:
    """Return the records of schemes."""
    return SCHEMES
