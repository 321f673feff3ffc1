"""quark: post-training quantization for PyTorch, in which everything that varies is a plugin.

The registries of what is installed are `quark.plugins.formats` and its siblings, re-exported here:
``quark.schemes().get("fp8")``. Importing this package imports next to nothing else; plugins are found when a
registry is first asked for. ``quark.algorithms`` is a package too, which answers when it is called (see
`quark.base.lazy.make_callable`). AMD Quark's public API is `quark.torch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quark.base.version import VERSION
from quark.torch.finder import install

if TYPE_CHECKING:
    from quark.plugins import (
        algorithms,
        commands,
        datasets,
        exporters,
        formats,
        graph_ops,
        layer_types,
        metrics,
        observers,
        quant_modes,
        schemes,
        selectors,
        templates,
    )

__version__ = VERSION
__all__ = [
    "__version__",
    "algorithms",
    "commands",
    "datasets",
    "exporters",
    "formats",
    "graph_ops",
    "layer_types",
    "metrics",
    "observers",
    "quant_modes",
    "schemes",
    "selectors",
    "templates",
]

install()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'quark' has no attribute '{name}'", name=name)
    from quark import plugins  # not above: `import quark` stays free of pluggy and of metadata until a registry is asked for

    return getattr(plugins, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
