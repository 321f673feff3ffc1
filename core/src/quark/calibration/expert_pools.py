"""Experts whose inputs share one scale.

Forwards rehearse the mixture until the scale is known, before the first expert is rounded.

A forward reaches an expert only after it has passed the previous expert, and the last projection of an expert
reads the output of rounded projections. So the mixture runs several times: first to observe the inputs of
each expert; then, with the first projections rounded, to observe the inputs of the next projections, and so
on. Layers that depend on an observed layer are not computed in a rehearsal, so that it costs little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from quark.calibration.activation_scales import INPUT, ActivationScales, Key
from quark.calibration.forwards import Forward, current_forward
from quark.calibration.lockstep import BlockRun
from quark.models.plan.decoder_blocks import Block

__all__ = ["PooledExperts", "pooled_experts"]


class PooledExperts:
    """The pause point of a module that calls experts, in place of its forward.

    Args:
        layers: Full names of the experts' layers whose inputs share scales.
        name: Full name of the module.
        number: Position among the pause points of the block: behind every layer that the module calls.
        scales: Scales of the block's activations.
        block_run: The forwards through the block.
    """

    def __init__(self, layers: Iterable[str], name: str, number: float, scales: ActivationScales, block_run: BlockRun) -> None:
        self.name = name
        self.number = number
        self._layers = frozenset(layers)
        self._scales = scales
        self._block_run = block_run
        self._first: dict[Forward, dict[str, Tensor]] = {}
        self._seen: set[Key] = set()
        self._is_known = False

    def passed(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the output of the module.

        Until the shared scales are known, the forward rehearses and pauses here first.
        """
        forward = current_forward()
        if forward is not None and not forward.is_float:
            while not self._is_known:
                forward.rehearsal, self._first[forward] = self, {}
                plain(*args, **kwargs)
                forward.rehearsal = None
                self._block_run.stop(self)
        return plain(*args, **kwargs)

    def looks_at(self, layer: str, x: Tensor) -> bool:
        """Return whether the current forward only observes a layer's input.

        That input then counts for the shared scale.
        """
        forward = current_forward()
        assert forward is not None
        first = self._first[forward]
        if layer not in self._layers or not self._scales.wants(layer, INPUT):
            # Another layer: it can be rounded now if it does not depend on a layer that the rehearsal skips.
            return bool(first) if layer not in self._layers else self._scales.experts.expert(layer) in first
        if first.setdefault(self._scales.experts.expert(layer), x) is x:
            self._scales.see(layer, INPUT, x)
            self._seen.add((layer, INPUT))
        return True

    def set_scales(self) -> None:
        """Set the scales of the observed inputs, after all forwards of all ranks have rehearsed."""
        seen = sorted({key for keys in self._block_run.grid.ranks.gather(self._seen) for key in keys})
        self._scales.set_scales(seen)
        self._is_known = not seen or not any(self._scales.wants(layer, INPUT) for layer in self._layers)
        self._seen = set()
        self._first = {}


def pooled_experts(
    block: Block, names: Iterable[str], scales: ActivationScales, block_run: BlockRun
) -> Iterator[tuple[nn.Module, PooledExperts]]:
    """Yield the modules of a block that call experts whose inputs share scales, each with its pause point.

    Args:
        block: The block, at whose entry forwards wait.
        names: Full names of its layers, in order.
        scales: Scales of the block's activations.
        block_run: The forwards through the block.
    """
    ordered = {name: number for number, name in enumerate(names)}
    layers_of: dict[str, list[str]] = {}
    for name in ordered:
        projection = scales.experts.projection(name)
        if projection is not None and len(scales.pool_of(name)) > 1:
            layers_of.setdefault(_caller(block, projection.partition(".*.")[0]), []).append(name)
    for caller, layers in layers_of.items():
        number = _behind(ordered, block, caller)
        yield block.module.get_submodule(caller), PooledExperts(layers, block.prefix + caller, number, scales, block_run)


def _caller(block: Block, experts: str) -> str:
    """Return the name in the block of the module whose forward calls the experts.

    It is their parent, or its parent where that is a list.
    """
    inside = experts.removeprefix(block.prefix)
    holder = block.module.get_submodule(inside)
    return inside.rpartition(".")[0] if isinstance(holder, nn.ModuleList | nn.ModuleDict) else inside


def _behind(ordered: Mapping[str, int], block: Block, caller: str) -> float:
    """Return a position behind all layers of a module."""
    prefix = ".".join(part for part in (block.name, caller) if part)
    return max(number for name, number in ordered.items() if not prefix or name.startswith(f"{prefix}.")) + 0.5
