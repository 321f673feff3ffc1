"""Functions that round layers or copies of layers to nearest. `rounding_tasks` divides layers into tasks."""

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
    """Divide layers into rounding tasks.

    Layers are in one task if they have the same spec, dtype and class. Layers that share a scale form a
    separate task. Each layer with a table of values is a separate task too.

    Args:
        layers: Layers by full name. A layer is left out if it has no weight quantizer or already has codes.
            If ``statistics`` are given, all layers have the same input.
        siblings: Groups of name suffixes. Layers with the same parent and suffixes of one group share a scale
            if they have one scale per tensor.
        statistics: Statistics of the layers' input.
        held_out: Held-out tokens of the layers' input.
        ranks: The ranks that have the same tasks.
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
    """Round the weights of layers to nearest, and return the names of the layers.

    Args:
        layers: Layers by full name.
        siblings: As in `rounding_tasks`.
        defers: As in `quark.algorithms.RoundToNearest`.
    """
    nearest = RoundToNearest(defers=defers)
    for task in rounding_tasks(layers, siblings):
        nearest.round(task)
    return set(layers)


def configs_of(block: str, rows: Sequence[PlanRow]) -> dict[str, QLayerConfig]:
    """Return a dictionary from each linear layer with a quantized weight to its configuration.

    Names of layers are relative to the block.
    """
    prefix = f"{block}." if block else ""
    return {r.name.removeprefix(prefix): r.quantized_to for r in rows if r.has_quantized_matrix}


@contextmanager
def as_rounded(block: nn.Module, configs: Mapping[str, QLayerConfig], *, compensated: bool = False) -> Iterator[None]:
    """Replace layers of a block by copies that are rounded to nearest, in the body of the ``with`` statement.

    Args:
        block: The block.
        configs: Configurations of the block's layers, by name in the block.
        compensated: Whether the weights of layers with quantized inputs stay float. This approximates a
            rounding that compensates its errors: such a rounding leaves little error in the directions of the
            inputs, but cannot compensate the errors of quantized activations.
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
    """Return the residual stream after a block, which is the block's ``output``.

    If ``output`` is a tuple, its first element is the residual stream.
    """
    return output if isinstance(output, Tensor) else output[0]


def _forward_through(quantized: QuantizedLayer) -> Callable[..., Any]:
    """Return a ``forward`` function that computes a rounded copy of a layer.

    If the input has a static scale, this scale is computed from the input of each call.
    """

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        module = quantized.input_quantizer
        if module is not None and module.is_static:
            observer = module.quantizer.observer()
            observer.observe(x)
            module.set_qparams(module.quantizer.qparams_from(observer))
        return quantized.product(x, *args, **kwargs)

    return forward
