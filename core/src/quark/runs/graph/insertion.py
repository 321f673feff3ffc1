"""Insertion of quantizers into a graph: calls that observe in calibration, and then fake-quantize."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, fx, nn

from quark.calibration.batches import Call
from quark.calibration.finite import is_finite
from quark.config.slot import Slot
from quark.errors import CalibrationError, NonFiniteError, QuarkError
from quark.models.layers import QuantizerModule
from quark.numbers import Observer
from quark.runs.graph.placement import Point
from quark.runs.graph.tensors import add_module, free_path

__all__ = ["Observed", "insert", "is_static", "observe"]


class Observed(nn.Module):
    """Stands in the place of a quantizer during calibration: it observes the tensor and returns it as it is.

    Attributes:
        quantizer: The quantizer that will be there.
        observer: Collects the range of all tensors that share the quantizer.
    """

    def __init__(self, quantizer: QuantizerModule, observer: Observer) -> None:
        super().__init__()
        self.quantizer = quantizer
        self.observer = observer

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        self.observer.observe(x.detach())
        return x


def is_static(quantizer: QuantizerModule) -> bool:
    """Return whether a quantizer's scale is set by calibration."""
    return not quantizer.quantizer.is_dynamic and not quantizer.quantizer.is_float


def insert(model: fx.GraphModule, points: Sequence[Point]) -> list[str]:
    """Call a submodule at each point, and return the paths of those that have to be calibrated.

    A submodule has the name of the operator that asks first: ``"stem.0.output_quantizer"``.
    """
    paths: dict[int, str] = {}
    static = []
    quantized: dict[fx.Node, fx.Node] = {}
    for point in points:
        if (path := paths.get(id(point.group))) is None:
            path = paths[id(point.group)] = free_path(model, f"{point.operator}.{point.slot.quantizer_attribute}")
            quantizer = QuantizerModule(point.spec, activation=True, quantizer=point.quantizer)
            module: nn.Module = quantizer
            if is_static(quantizer):
                module = Observed(quantizer, quantizer.quantizer.observer())
                static.append(path)
            add_module(model, path, module)
        _call(model.graph, point, path, quantized)
    model.recompile()
    return static


def _call(graph: fx.Graph, point: Point, path: str, quantized: dict[fx.Node, fx.Node]) -> None:
    """Insert the call of one quantizer.

    ``quantized`` has the outputs that are quantized already, which inputs are made of.
    """
    tensor = quantized.get(point.tensor, point.tensor)
    readers = set(point.readers) or set(tensor.users)
    with graph.inserting_after(tensor):
        call = graph.call_module(path, (tensor,))
    call.meta = {"val": point.tensor.meta["val"]}
    tensor.replace_all_uses_with(call, delete_user_cb=lambda user: user in readers, propagate_meta=False)
    if point.slot is Slot.output_tensors:
        quantized[point.tensor] = call


def observe(model: fx.GraphModule, paths: Iterable[str], calls: Sequence[Call]) -> None:
    """Run the model on calibration data, then replace observers by quantizers with their ranges.

    What is observed are the values that the model computes with quantized parameters and float activations.
    Quantized activations would be nearer to the finished model, and have no order: a tensor that is added, or
    joined, behind other operators shares its scale with what these make of it.

    Raises:
        CalibrationError: The graph cannot be called with a batch.
        NonFiniteError: An activation holds NaN or Inf.
    """
    with torch.no_grad():
        for number, call in enumerate(calls):
            try:
                call.run(model)
            except QuarkError:
                raise  # names its own cause and fix
            except Exception as error:
                raise CalibrationError(
                    f"the graph cannot be called with calibration batch {number} ({type(error).__name__}: {error}). Its inputs "
                    f"are {_inputs(model)}, and a batch has nothing else, such as labels. A size that is fixed there was fixed when the "
                    "model was captured: leave out a last, smaller batch (drop_last=True), or capture the model with "
                    "quark.runs.graph.capture, which lets the batch vary"
                ) from error
    for path in paths:
        observed = model.get_submodule(path)
        assert isinstance(observed, Observed)
        low, high = observed.observer.range()
        if not (is_finite(low) and is_finite(high)):
            raise NonFiniteError(
                f"a tensor of '{path}' holds NaN or Inf during calibration: the model overflows there (float16?), or weights or data are "
                "bad. Nothing has been changed",
                tensor=path,
            )
        observed.quantizer.set_qparams(observed.quantizer.quantizer.qparams_from(observed.observer))
        add_module(model, path, observed.quantizer)


def _inputs(model: fx.GraphModule) -> str:
    shapes = [f"{node.name} {_shape(node.meta.get('val'))}".strip() for node in model.graph.nodes if node.op == "placeholder"]
    return ", ".join(shapes) or "none"


def _shape(value: object) -> str:
    return f"[{', '.join(map(str, value.shape))}]" if isinstance(value, Tensor) else ""
