"""quark is a library for post-training quantization in PyTorch. Plugins provide its schemes, formats and
algorithms.

This package re-exports registries such as `quark.plugins.schemes`: ``quark.schemes().get("fp8")`` returns the
scheme "fp8". A registry looks for plugins when it is first used, so importing this package imports almost
nothing else. ``quark.algorithms`` is a package that can also be called (see `quark.base.lazy.make_callable`).
`quark.torch` imports its contents from the distribution that provides AMD Quark's import paths.
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
    sys.meta_path.append(_HandsOver)  # Python asks it only for modules that have no file in this package


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'quark' has no attribute '{name}'", name=name)
    from quark import plugins  # not at the top: `import quark` loads neither pluggy nor metadata

    return getattr(plugins, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
