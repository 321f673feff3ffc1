"""quark: post-training quantization for PyTorch, in which everything that varies is a plugin.

Importing this package imports nothing else; what is installed is found when a registry is first asked for. ``quark.templates`` and
``quark.algorithms`` are packages too, which answer when they are called (see `quark.callable_module`). The documented API is `quark.torch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quark.version import VERSION

if TYPE_CHECKING:
    from quark.plugins import (
        AlgorithmRecord,
        ExporterRecord,
        FormatRecord,
        LayerTypeRecord,
        ObserverRecord,
        Registry,
        SchemeRecord,
        TemplateRecord,
    )

__version__ = VERSION
__all__ = ["__version__", "algorithms", "exporters", "formats", "layer_types", "observers", "schemes", "templates"]

# The imports below are inside the functions on purpose: `import quark` stays free of pluggy and of metadata until a registry is asked for.


def formats() -> Registry[FormatRecord]:
    """All installed number formats."""
    from quark.plugins import formats as registry

    return registry()


def observers() -> Registry[ObserverRecord]:
    """All installed observers."""
    from quark.plugins import observers as registry

    return registry()


def schemes() -> Registry[SchemeRecord]:
    """All installed schemes: ``names()``, ``get(name)``, ``conflicts()``, ``failures()``."""
    from quark.plugins import schemes as registry

    return registry()


def algorithms() -> Registry[AlgorithmRecord]:
    """All installed algorithms."""
    from quark.plugins import algorithms as registry

    return registry()


def templates() -> Registry[TemplateRecord]:
    """All installed model families."""
    from quark.plugins import templates as registry

    return registry()


def exporters() -> Registry[ExporterRecord]:
    """All installed exporters."""
    from quark.plugins import exporters as registry

    return registry()


def layer_types() -> Registry[LayerTypeRecord]:
    """All layer types that can be quantized."""
    from quark.plugins import layer_types as registry

    return registry()
