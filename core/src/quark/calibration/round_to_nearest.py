"""Round layers, or copies of them, to nearest; and divide layers into rounding tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from quark.algorithms import HeldOut, RoundingTask, RoundToNearest, Statistic
from quark.base.ranks import ALONE, Ranks
from quark.calibration.forwards import replaced_forward
from quark.config.layer import QLayerConfig
from quark.models.layers import QuantizedLayer, quantized_class
from quark.models.plan.plan_row import PlanRow


def rounding_tasks(
    layers: Mapping[str, QuantizedLayer],
    siblings: Sequence[Sequence[str]],
    statistics: Mapping[type[Statistic], Statistic] | None = None,
    held_out: HeldOut | None = None,
    ranks: Ranks = ALONE,
) -> list[RoundingTask]:
    """Return the rounding tasks of layers: one for each spec, dtype, class, shared scale and table.

    Args:
        layers: Layers by full name; layers without a weight quantizer, or with codes already, are left out.
            With statistics, all have one input.
        siblings: Suffixes of layers that share one scale over the whole tensor.
        statistics: Statistics of the layers' input.
        held_out: Held-out tokens of that input.
        ranks: Ranks that have the same tasks.
    """
    remaining = {name: layer for name, layer in layers.items() if (q := layer.weight_quantizer) is not None and q.codes is None}
    tasks: list[RoundingTask] = []
    for suffixes in siblings:
        for name in [n for n in remaining if n.rsplit(".", 1)[-1] == suffixes[0]]:
            parent = name.removesuffix(suffixes[0])
            members = [parent + s for s in suffixes]
            if all(m in remaining and _has_tensor_scale(remaining[m]) for m in members):
                stack = {m: remaining.pop(m) for m in members}
                tasks.append(RoundingTask(stack, statistics or {}, shares_scale=True, held_out=held_out, ranks=ranks))
    alike: dict[object, dict[str, QuantizedLayer]] = {}
    for name, layer in remaining.items():
        assert layer.weight_quantizer is not None
        quantizer = layer.weight_quantizer.quantizer
        own = None if quantizer.stored_level.format.table_shape is None else name  # a layer with a table is a task by itself
        alike.setdefault((quantizer, layer.weight.dtype, type(layer), own), {})[name] = layer
    return [*tasks, *(RoundingTask(members, statistics or {}, held_out=held_out, ranks=ranks) for members in alike.values())]


def _has_tensor_scale(layer: QuantizedLayer) -> bool:
    return layer.weight_quantizer is not None and layer.weight_quantizer.quantizer.has_tensor_scale


def round_to_nearest(layers: Mapping[str, QuantizedLayer], siblings: Sequence[Sequence[str]], *, defers: bool = False) -> set[str]:
    """Round the weights of layers to nearest, siblings with one scale; return the layers' names.

    ``defers`` is as in `quark.algorithms.RoundToNearest`.
    """
    nearest = RoundToNearest(defers=defers)
    for task in rounding_tasks(layers, siblings):
        nearest.round(task)
    return set(layers)


def configs_of(block: str, rows: Sequence[PlanRow]) -> dict[str, QLayerConfig]:
    """Return the configuration of each linear layer with a quantized weight, by its name in the block."""
    prefix = f"{block}." if block else ""
    return {r.name.removeprefix(prefix): r.quantized_to for r in rows if r.has_quantized_matrix}


@contextmanager
def as_rounded(block: nn.Module, configs: Mapping[str, QLayerConfig], *, compensated: bool = False) -> Iterator[None]:
    """Let copies that are rounded to nearest replace layers of a block while the body runs.

    Args:
        block: The block.
        configs: Configurations of its layers.
        compensated: Whether the weights of layers with quantized inputs stay float. This approximates a
            rounding that compensates its errors: it leaves little error in the directions of the inputs, but
            it cannot compensate errors of activations.
    """
    layers = {name: block.get_submodule(name) for name in configs}
    copies = {name: quantized_class(layer).from_float(layer, configs[name]) for name, layer in layers.items()}
    to_round = {name: layer for name, layer in copies.items() if not (compensated and configs[name].input_tensors is not None)}
    round_to_nearest(to_round, ())
    with ExitStack() as stack:
        for name, quantized in copies.items():
            stack.enter_context(replaced_forward(block.get_submodule(name), _forward_through(quantized)))
        yield


def tensor_of(output: Any) -> Tensor:
    """Return the residual stream after a block: its output, or the first element of a tuple."""
    return output if isinstance(output, Tensor) else output[0]


def _forward_through(quantized: QuantizedLayer) -> Callable[..., Any]:
    """Return a forward pass through a rounded copy of a layer.

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
