"""FX graph mode: quantization of the operators in the graph of a model, functions such as ``torch.add`` among them."""

from quark.graph.capture import capture
from quark.graph.plan import GraphPlan, GraphRow
from quark.graph.quantize import plan_graph, quantize_graph

__all__ = ["GraphPlan", "GraphRow", "capture", "plan_graph", "quantize_graph"]
