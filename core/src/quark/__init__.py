"""quark: post-training quantization for PyTorch, in which everything that varies is a plugin.

The registries of what is installed are `quark.plugins.formats` and its siblings, re-exported here:
``quark.schemes().get("fp8")``. Importing this package imports next to nothing else; plugins are found when a
registry is first asked for. ``quark.algorithms`` is a package too, which answers when it is called (see
`quark.base.lazy.make_callable`). `quark.torch` hands over to the distribution that has AMD Quark's import
paths.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from quark.base.version import VERSION
from quark.torch import _HandsOver

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

if _HandsOver not in sys.meta_path:
    sys.meta_path.append(_HandsOver)  # it is asked for modules that are no files


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'quark' has no attribute '{name}'", name=name)
    from quark import plugins  # not above: `import quark` stays free of pluggy and of metadata until a registry is asked for

    return getattr(plugins, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
