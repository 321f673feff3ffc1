"""Trials: what a block would compute if its layers were rounded to nearest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from quark.algorithms import RoundToNearest
from quark.calibration.activation_scales import static_input
from quark.calibration.lockstep import replaced_forward
from quark.calibration.rounding_tasks import rounding_tasks
from quark.config.layer import QLayerConfig
from quark.modules import QuantizedLayer, quantized_class
from quark.planning.plan import PlanRow


def configs_of(block: str, rows: Sequence[PlanRow]) -> dict[str, QLayerConfig]:
    """What each linear layer of a block, named relative to it, is going to be quantized to; layers of other kinds are left out."""
    prefix = f"{block}." if block else ""
    return {
        r.name.removeprefix(prefix): r.config
        for r in rows
        if r.config is not None and r.config.weight is not None and r.module_type == nn.Linear.__name__
    }


@contextmanager
def as_rounded(block: nn.Module, configs: Mapping[str, QLayerConfig]) -> Iterator[None]:
    """While the body runs, layers of a block compute what copies of them would that are rounded to nearest."""
    copies = _rounded(block, configs)
    with ExitStack() as stack:
        for name, made in copies.items():
            stack.enter_context(replaced_forward(block.get_submodule(name), _trying(made)))
        yield


def tensor_of(output: Any) -> Tensor:
    """What a block adds to the residual stream: its output, or the first of several."""
    found: Tensor = output if isinstance(output, Tensor) else output[0]
    return found


def _rounded(block: nn.Module, configs: Mapping[str, QLayerConfig]) -> dict[str, QuantizedLayer]:
    """Copies of all layers, rounded."""
    nearest = RoundToNearest()
    layers = {name: block.get_submodule(name) for name in configs}
    made = {name: quantized_class(layer).from_float(layer, configs[name]) for name, layer in layers.items()}
    for problem in rounding_tasks(made, ()):
        nearest.round(problem)
    return made


def _trying(made: QuantizedLayer) -> Callable[..., Any]:
    """A layer's forward through its rounded copy; a static input scale is that of the input at hand, whatever came before it."""

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        module = static_input(made)
        if module is not None:
            observer = module.quantizer.observer()
            observer.observe(x)
            module.set_qparams(module.quantizer.qparams_from(observer))
        return made.product(x, *args, **kwargs)

    return forward
