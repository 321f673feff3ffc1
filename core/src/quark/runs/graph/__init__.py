"""FX graph mode: quantization of the operators in a model's graph, such as ``torch.add``."""

from quark.runs.graph.capture import capture
from quark.runs.graph.plan import GraphPlan, GraphRow
from quark.runs.graph.quantize import plan_graph, quantize_graph

__all__ = ["GraphPlan", "GraphRow", "capture", "plan_graph", "quantize_graph"]
