"""FX graph mode. It captures a model as a graph, and quantizes the operators of the graph, such as
``torch.add``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quark.base.lazy import LazyRef

if TYPE_CHECKING:
    from quark_graph.graph_capture import capture
    from quark_graph.plan import GraphPlan, GraphRow
    from quark_graph.quantize import plan_graph, quantize_graph

__all__ = ["GraphPlan", "GraphRow", "capture", "plan_graph", "quantize_graph"]

_MODULES = {"GraphPlan": "plan", "GraphRow": "plan", "capture": "graph_capture", "plan_graph": "quantize", "quantize_graph": "quantize"}


def __getattr__(name: str) -> Any:
    # Loaded here, because these modules import torch. The plugin's module in this package must not import
    # torch.
    if name not in _MODULES:
        raise AttributeError(f"module 'quark_graph' has no attribute '{name}'", name=name)
    return LazyRef(f"quark_graph.{_MODULES[name]}:{name}").load()
