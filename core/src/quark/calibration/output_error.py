"""The output of a block with its layers rounded to nearest.

Rounded copies replace the layers for the time of a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from quark.algorithms import RoundToNearest
from quark.calibration.forwards import replaced_forward
from quark.calibration.rounding_tasks import rounding_tasks
from quark.config.layer import QLayerConfig
from quark.models.layers import QuantizedLayer, quantized_class
from quark.models.plan.plan_row import PlanRow

__all__ = ["as_rounded", "configs_of", "tensor_of"]


def configs_of(block: str, rows: Sequence[PlanRow]) -> dict[str, QLayerConfig]:
    """Return the configuration of each linear layer with a quantized weight.

    Names are those in the block.
    """
    prefix = f"{block}." if block else ""
    return {r.name.removeprefix(prefix): r.quantized_to for r in rows if r.has_quantized_matrix}


@contextmanager
def as_rounded(block: nn.Module, configs: Mapping[str, QLayerConfig], *, compensated: bool = False) -> Iterator[None]:
    """Let copies that are rounded to nearest stand in for layers of a block while the body runs.

    Args:
        block: The block.
        configs: Of its layers.
        compensated: Whether the weights of layers with quantized inputs stay float, as what comes near to a
            rounding that compensates its errors: it leaves little of them in the directions that inputs have,
            and nothing can compensate those of activations.
    """
    copies = _rounded(block, configs, compensated)
    with ExitStack() as stack:
        for name, quantized in copies.items():
            stack.enter_context(replaced_forward(block.get_submodule(name), _forward_through(quantized)))
        yield


def tensor_of(output: Any) -> Tensor:
    """Return the residual stream after a block: its output, or the first element of a tuple."""
    return output if isinstance(output, Tensor) else output[0]


def _rounded(block: nn.Module, configs: Mapping[str, QLayerConfig], compensated: bool) -> dict[str, QuantizedLayer]:
    """Return rounded copies of the layers in ``configs``; see `as_rounded`."""
    nearest = RoundToNearest()
    layers = {name: block.get_submodule(name) for name in configs}
    quantized = {name: quantized_class(layer).from_float(layer, configs[name]) for name, layer in layers.items()}
    to_round = {name: layer for name, layer in quantized.items() if not (compensated and configs[name].input_tensors is not None)}
    for task in rounding_tasks(to_round, ()):
        nearest.round(task)
    return quantized


def _forward_through(quantized: QuantizedLayer) -> Callable[..., Any]:
    """Return a forward through a rounded copy of a layer.

    A static input scale is computed from the input of each call.
    """

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        module = quantized.input_quantizer
        if module is not None and module.is_static:
            observer = module.quantizer.observer()
            observer.observe(x)
            module.set_qparams(module.quantizer.qparams_from(observer))
        return quantized.product(x, *args, **kwargs)

    return forward
