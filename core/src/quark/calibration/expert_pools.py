"""Experts whose inputs share one scale: forwards rehearse them until it is known, since it must be before the first of them is rounded.

An expert is reached only when the one before it has been passed, and what closes it gets what the rounded layers before it give. So the
mixture runs several times: first with a look at what each expert gets, then, its first layers being rounded for that, with a look at what
the layers behind them get, and so on. What lies behind a layer that is looked at is left out, so that a rehearsal costs little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from quark.calibration.activation_scales import INPUT, ActivationScales, Key
from quark.calibration.lockstep import BlockRun, Forward, current_forward
from quark.planning.decoder_blocks import Block


class PooledExperts:
    """Stands in for a module that calls experts.

    Args:
        layers: By full name, the experts' layers whose inputs share scales, with their places among the layers of the block.
        number: Its own place: behind every layer that it calls.
        scales: Of the block.
        block_run: The forwards that come here.
    """

    def __init__(self, layers: Iterable[str], number: float, scales: ActivationScales, block_run: BlockRun) -> None:
        self.number = number
        self._layers = frozenset(layers)
        self._scales = scales
        self._block_run = block_run
        self._first: dict[Forward, dict[str, Tensor]] = {}
        self._seen: set[Key] = set()
        self._is_known = False

    def passed(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of the module's forward."""
        forward = current_forward()
        if forward is not None and not forward.is_float:
            while not self._is_known:
                forward.rehearsal, self._first[forward] = self, {}
                plain(*args, **kwargs)
                forward.rehearsal = None
                self._block_run.stop(self)
        return plain(*args, **kwargs)

    def looks_at(self, layer: str, x: Tensor) -> bool:
        """Whether the layer that is not finished is only to be looked at by the current forward; its input is taken into the scale then."""
        forward = current_forward()
        assert forward is not None
        first = self._first[forward]
        if layer not in self._layers or not self._scales.wants(layer, INPUT):
            # Something else: it is in time to be finished if it does not depend on what was left out.
            return bool(first) if layer not in self._layers else self._scales.experts.expert(layer) in first
        if first.setdefault(self._scales.experts.expert(layer), x) is x:
            self._scales.see(layer, INPUT, x)
            self._seen.add((layer, INPUT))
        return True

    def set_scales(self) -> None:
        """All forwards have rehearsed: set the scales of what they have looked at."""
        self._scales.set_scales(self._seen)
        self._is_known = not self._seen or not any(self._scales.wants(layer, INPUT) for layer in self._layers)
        self._seen = set()
        self._first = {}


def pooled_experts(
    block: Block, names: Iterable[str], scales: ActivationScales, block_run: BlockRun
) -> Iterator[tuple[nn.Module, PooledExperts]]:
    """Modules of a block that call experts whose inputs share scales, each with what is to stand in for it.

    Args:
        block: At whose entry forwards wait.
        names: Of its layers, in order.
        scales: Of the block.
        block_run: The forwards.
    """
    ordered = {name: number for number, name in enumerate(names)}
    found: dict[str, list[str]] = {}
    for name in ordered:
        projection = scales.experts.projection(name)
        if projection is not None and len(scales.pool_of(name)) > 1:
            found.setdefault(_caller(block, projection.partition(".*.")[0]), []).append(name)
    for caller, layers in found.items():
        yield block.module.get_submodule(caller), PooledExperts(layers, _behind(ordered, block, caller), scales, block_run)


def _caller(block: Block, experts: str) -> str:
    """The name in the block of the module whose forward calls the experts: that which holds them, unless that is a mere list of them."""
    inside = experts.removeprefix(f"{block.name}." if block.name else "")
    holder = block.module.get_submodule(inside)
    return inside.rpartition(".")[0] if isinstance(holder, nn.ModuleList | nn.ModuleDict) else inside


def _behind(ordered: Mapping[str, int], block: Block, caller: str) -> float:
    """A place behind all layers of a module."""
    prefix = ".".join(part for part in (block.name, caller) if part)
    return max(number for name, number in ordered.items() if not prefix or name.startswith(f"{prefix}.")) + 0.5
