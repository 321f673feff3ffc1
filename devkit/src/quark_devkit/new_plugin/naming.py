"""Naming: the names in a new distribution, all derived from the distribution's own."""

from __future__ import annotations

import keyword
import re
import sys
from typing import Self

import attrs

from quark.errors import ConfigError
from quark.plugins.discovery import normalized

__all__ = ["Naming"]

_DISTRIBUTION = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?", re.IGNORECASE)
"""The names of distributions. Source: the specification of names and normalization of the Python Packaging
Authority (PEP 508, PEP 503).
"""
_SUBJECT_WORDS = {"plugin", "plugins", "quant", "quantization", "quantizer", "quark"}
"""Words of a distribution's name that say what every such distribution is for, and not whose it is."""
_TAKEN = {"attr", "attrs", "quark", "safetensors", "tests", "torch", "transformers", *sys.stdlib_module_names}
"""Names of packages that the new one would hide, or that would hide it."""


@attrs.frozen
class Naming:
    """The names of one distribution.

    Attributes:
        distribution: Normalized name, such as ``"acme-quant"``.
        package: Import name, such as ``"acme_quant"``.
        prefix: First part of the names of records, such as ``"acme"``.

    >>> naming = Naming.of("Acme.Quant")
    >>> naming.distribution, naming.package, naming.prefix, naming.class_prefix
    ('acme-quant', 'acme_quant', 'acme', 'Acme')
    """

    distribution: str
    package: str
    prefix: str

    @classmethod
    def of(cls, name: str) -> Self:
        """Return the names of the distribution ``name``, in any spelling that package indexes take.

        Raises:
            ConfigError: It is no name of a distribution, or no package can have a name like it.
        """
        if not _DISTRIBUTION.fullmatch(name):
            raise ConfigError(
                f"{name!r} is no name of a distribution: write ASCII letters and digits with '-', '_' or '.' between, such as acme-quant"
            )
        distribution = normalized(name)
        package = distribution.replace("-", "_")
        if not package.isidentifier() or keyword.iskeyword(package):
            raise ConfigError(f"'{distribution}' would be imported as '{package}', which is no name in Python: choose another")
        if package in _TAKEN:
            raise ConfigError(f"'{distribution}' would be imported as '{package}', which is another package: choose another")
        own = "_".join(word for word in package.split("_") if word not in _SUBJECT_WORDS)
        return cls(distribution, package, own if own.isidentifier() else package)

    @property
    def class_prefix(self) -> str:
        """Return the first part of the names of classes, such as ``"Acme"``."""
        return "".join(word.capitalize() for word in self.prefix.split("_"))

    def class_of(self, ending: str) -> str:
        """Return the name of a class for the record with that ending: ``"AcmeInt3"`` for ``"int3"``."""
        return f"{self.class_prefix}{ending.capitalize()}"
