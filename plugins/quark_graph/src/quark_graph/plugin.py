"""The plugin of quark-graph: FX graph mode and its operators. It imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from quark.plugins import GraphOpRecord, QuantModeRecord, hookimpl
from quark_graph.torch_operators import operators_of_torch

__all__ = ["QUARK_API", "quark_register_graph_ops", "quark_register_quant_modes"]

QUARK_API = (2, 2)


@hookimpl
def quark_register_quant_modes() -> Iterable[QuantModeRecord]:
    """Yield the record of FX graph mode."""
    yield QuantModeRecord(
        name="fx_graph_mode",
        summary="quantizes the operators in a model's graph, such as torch.add",
        plan="quark_graph.quantize:plan_graph",
        quantize="quark_graph.quantize:quantize_graph",
    )


@hookimpl
def quark_register_graph_ops() -> Iterable[GraphOpRecord]:
    """Yield the records of torch's operators."""
    yield from operators_of_torch()
