"""Static scales of activations: this module decides which activations share a scale and when each scale is
set.

An activation is the input or output of a layer, or a tensor inside attention such as a key of the KV cache.
No other module sets scales of activations. A layer's scales are set before its weight is rounded, so that
rounding sees the quantized input of the exported layer. The scales of a KV cache are merged with the
functions of `quark.models.plan.kv_scales`. Exporters use the same functions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.base.log import get_logger
from quark.base.names import folded
from quark.base.ranks import ALONE, Ranks
from quark.calibration.attention import attention_quantizers, calibrating
from quark.calibration.forwards import is_counted
from quark.config.architecture import Architecture
from quark.config.layer import Slot
from quark.config.model import QConfig
from quark.errors import CalibrationError, NonFiniteError
from quark.models.layers import QuantizedLayer, QuantizerModule
from quark.models.layers.attention import KEY, PROBABILITIES, QUERY, VALUE
from quark.models.plan.attention import AttentionRow
from quark.models.plan.kv_scales import kv_scale_groups, merge_kv_scales
from quark.models.plan.mixtures import ExpertNames
from quark.numbers import Observer, QParams

INPUT, OUTPUT = Slot.input_tensors, Slot.output_tensors

Key = tuple[str, str]
"""A key that identifies an activation. It is a pair: the full name of a layer and `INPUT` or `OUTPUT`, or the
full name of an attention module and one of its attributes.
"""


_NAMES = {
    "input_tensors": "input of '{}'",
    "output_tensors": "output of '{}'",
    PROBABILITIES: "attention probabilities of '{}'",
    QUERY: "queries of '{}' after the rotary embedding",
    KEY: "keys of '{}' after the rotary embedding",
    VALUE: "values of '{}'",
}


@attrs.define(eq=False)
class Observation:
    """The observer of one activation during calibration.

    Attributes:
        owner: Full name of a layer, or of an attention module.
        slot: ``input_tensors`` or ``output_tensors`` of a layer, or an attribute of an attention module
            (`quark.models.layers.attention`).
        module: The quantizer of the activation. The computed scales are set there.
        observer: Collects the range of the activation.
    """

    owner: str
    slot: str
    module: QuantizerModule
    observer: Observer

    @property
    def tensor(self) -> str:
        """The activation's name in messages, such as ``input of 'layers.0.up_proj'``."""
        return _NAMES[self.slot].format(self.owner)

    @property
    def has_seen(self) -> bool:
        """Whether the observer has received at least one tensor."""
        try:
            self.observer.range()
        except CalibrationError:
            return False
        return True

    @property
    def has_one_scale(self) -> bool:
        """Whether the activation has a single scale, instead of one per channel or block."""
        return self.module.quantizer.empty_qparams((1, 1), "meta").scale.ndim == 0

    def renew(self) -> None:
        """Replace the observer with a new one. The ranges of all tensors observed so far are lost."""
        self.observer = self.module.quantizer.observer()

    def qparams(self) -> QParams:
        """Return the scales for the observed range.

        Raises:
            NonFiniteError: NaN or Inf was observed.
            CalibrationError: Nothing was observed.
        """
        try:
            low, high = self.observer.range()
        except CalibrationError as error:
            fix = "Give data that uses this layer" + (", or exclude the layer" if self.slot == "input_tensors" else "")
            raise CalibrationError(f"no calibration batch reached '{self.owner}', so its static scale is unknown. {fix}") from error
        if not bool(torch.isfinite(low).all() & torch.isfinite(high).all()):
            raise NonFiniteError(
                f"the {self.tensor} contained NaN or Inf during calibration. Check the weights and the data; if the model runs in float16, "
                "use bfloat16 or float32. Load the model again before the next attempt, because earlier blocks are already quantized",
                tensor=self.tensor,
            )
        return self.module.quantizer.qparams_from(self.observer)


class ActivationScales:
    """Collects the ranges of the static activations of some layers and attention modules, and sets their
    scales.

    Activations share a scale in three cases. First, if the configuration pools the inputs of experts, each
    projection has one input scale for all experts. Second, the keys and values of one attention module share
    a scale if they have one scale per tensor and ``separate_kv_scales`` is not set. Third, an expert that no
    token has reached gets the scale of the other experts.

    Args:
        layers: Quantized layers by full name. Activation scales that they already have are not changed. If
            the output of a layer is quantized inside attention, the layer loses its output quantizer.
        attentions: The attention modules of the same block or model.
        config: Decides which activations share a scale.
        architecture: Facts about the model family, or None if the family is not known.
        ranks: The ranks of the run. Each rank observes the tensors of its own forward passes. Scales are set
            on all ranks at once. They are computed from the observations of all ranks.

    Attributes:
        inside: The quantizers of attention modules. They are not installed yet.
        experts: Tells which layers belong to experts.
    """

    def __init__(
        self,
        layers: Mapping[str, QuantizedLayer],
        attentions: Sequence[AttentionRow],
        config: QConfig,
        architecture: Architecture | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._ranks = ranks
        self.inside = attention_quantizers(layers, attentions)
        self.experts = ExpertNames(architecture)
        self._floor = config.min_kv_scale
        self._items: dict[Key, Observation] = {}
        self._done: set[Key] = set()
        for key, module in self._quantizers(layers):
            if module.is_static and module.qparams is None:
                self._items[key] = Observation(*key, module, module.quantizer.observer())
        self._experts = self._by_projection()
        self._pools = [keys for (_, slot), keys in self._experts.items() if slot == INPUT] if config.sync_moe_expert_input_amax else []
        self._caches = self._sharing(attentions, config, architecture)

    def __bool__(self) -> bool:
        """Return whether any activation is static and had no scale at the start."""
        return bool(self._items)

    def see(self, owner: str, slot: str, x: Tensor) -> None:
        """Observe a tensor of an activation. Do nothing if the activation is not static or already has its
        scale.
        """
        item = self._items.get((owner, slot))
        if item is not None and (owner, slot) not in self._done:
            item.observer.observe(x.detach())

    def wants(self, owner: str, slot: str) -> bool:
        """Return whether an activation is static and has no scale yet."""
        return (owner, slot) in self._items and (owner, slot) not in self._done

    def pool_of(self, layer: str) -> Sequence[Key]:
        """Return the inputs that share the scale of a layer's input, including that input.

        The result is empty if the input shares its scale with no other input.
        """
        return next((members for members in self._pools if (layer, INPUT) in members), ())

    def sharing_outputs(self) -> Iterator[tuple[str, ...]]:
        """Yield groups of layers whose outputs share a scale. A group has the full names of its layers."""
        for keys in self._caches:
            if len(keys) > 1 and all(slot == OUTPUT for _, slot in keys):
                yield tuple(name for name, _ in keys)

    def set_scales(self, wanted: Iterable[Key]) -> None:
        """Set the scales of activations.

        A scale is computed from the observed ranges of all activations that share it. Activations that are
        not static or that already have their scales are skipped.

        Raises:
            CalibrationError: Nothing was observed.
            NonFiniteError: NaN or Inf was observed.
        """
        pending = [key for key in wanted if self.wants(*key)]
        pool_of = {key: self.pool_of(key[0]) if key[1] == INPUT else () for key in pending}
        cache_of = {key: next((members for members in self._caches if key in members), ()) for key in pending}
        observed = self._of_all_ranks(dict.fromkeys(k for key in pending for k in (key, *pool_of[key], *cache_of[key])))
        for key in pending:
            if key in self._done:
                continue  # it was set together with another activation that shares the scale
            if pool_of[key]:
                self._give_common(pool_of[key], [observed[member] for member in pool_of[key]])
            elif cache_of[key]:
                self._give_cache(key, cache_of[key], observed)
            else:
                self._give(key, observed[key].qparams())

    def forget(self, layer: str) -> None:
        """Forget the scales of a layer, because the layer turned out to read another tensor than expected.

        The layer's activations are then observed again. A scale that the layer shares with other experts is
        not forgotten.
        """
        for key in [(layer, INPUT), (layer, OUTPUT)]:
            if key in self._done and not self.pool_of(layer):
                self._items[key].renew()
                self._done.discard(key)

    def finish(self) -> None:
        """Set the scales that are not set yet.

        Experts that no token has reached get the scale of the other experts. In that case, a warning is
        logged.
        """
        observed = self._of_all_ranks([key for members in self._experts.values() for key in members])
        unseen = [key for key, item in observed.items() if not item.has_seen]
        for members in self._experts.values():
            self._give_common([key for key in members if key in unseen and key not in self._done], [observed[key] for key in members])
        self.set_scales(list(self._items))
        if idle := list(dict.fromkeys(name for name, _ in unseen)):
            get_logger(__name__).warning(
                f"No calibration token reached {len(idle)} layer(s) of experts: {folded(idle)}. Their scales come from the ranges of "
                "the other experts. Give more calibration data, or more varied data."
            )

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Observe all static activations of ``model`` in the forward passes that run in the body of the
        ``with`` statement.

        The activations are not quantized or changed.
        """
        with ExitStack() as stack:
            for owner, slot in self._items:
                if slot == INPUT:
                    stack.callback(model.get_submodule(owner).register_forward_pre_hook(self._hook(owner, slot)).remove)
                elif slot == OUTPUT:
                    stack.callback(model.get_submodule(owner).register_forward_hook(self._hook(owner, slot)).remove)
            stack.enter_context(calibrating(model, self.inside, self._see_attention))
            yield

    def _quantizers(self, layers: Mapping[str, QuantizedLayer]) -> Iterator[tuple[Key, QuantizerModule]]:
        for name, layer in layers.items():
            for slot, module in ((INPUT, layer.input_quantizer), (OUTPUT, layer.output_quantizer)):
                if module is not None:
                    yield (name, slot), module
        for name, quantizers in self.inside.items():
            yield from (((name, attribute), module) for attribute, module in quantizers.items())

    def _by_projection(self) -> dict[Key, list[Key]]:
        """Return the inputs and outputs of experts that have one scale per tensor.

        The result is a dictionary from projection and slot to the activations of all experts.
        """
        groups: dict[Key, list[Key]] = {}
        for (name, slot), item in self._items.items():
            projection = self.experts.projection(name)
            if projection is not None and item.module.quantizer.has_tensor_scale:
                groups.setdefault((projection, slot), []).append((name, slot))
        return groups

    def _sharing(self, attentions: Sequence[AttentionRow], config: QConfig, architecture: Architecture | None) -> list[tuple[Key, ...]]:
        """Return groups of activations that are stored in the KV cache; the activations of a group share a
        scale.
        """
        keys_of = {name: [(name, slot)] for name, slot in self._items if slot == OUTPUT}
        cached = [(layer, (row.name, state)) for row in attentions for state, (layer, _) in row.states.items() if state != QUERY]
        for layer, key in cached:
            keys_of.setdefault(layer, []).append(key)
        # The second factor of a low-rank projection reads the output of another projection of the same
        # attention module. The two projections do not share a scale.
        inner = architecture.attention_inner if architecture is not None else ()
        second_factors = [name for name in keys_of if name.endswith(tuple(f".{n}" for n in inner))]
        patterns = [*config.kv_cache_group, *config.kv_cache_quant_config]
        static = [name for name, keys in keys_of.items() if all(k in self._items for k in keys)]
        common = [] if config.separate_kv_scales else [n for n in static if all(self._items[k].has_one_scale for k in keys_of[n])]
        groups = kv_scale_groups([n for n in common if n not in second_factors], patterns)
        groups += kv_scale_groups([n for n in common if n in second_factors], patterns, separate=True)
        alone = kv_scale_groups([n for n in static if n not in common], patterns, separate=True)
        sharing = [tuple(key for name in group for key in keys_of[name]) for group in groups]
        return [*sharing, *((key,) for (name,) in alone for key in keys_of[name])]

    def _of_all_ranks(self, keys: Collection[Key]) -> dict[Key, Observation]:
        """Return the `Observation` of each activation in ``keys``, merged over all ranks."""
        if self._ranks.size == 1 or not keys:
            return {key: self._items[key] for key in keys}
        observers = self._ranks.gather({key: self._items[key].observer for key in keys})
        return {key: self._merged(key, (each[key] for each in observers)) for key in keys}

    def _merged(self, key: Key, observers: Iterable[Observer]) -> Observation:
        """Return an `Observation` of an activation, with a new observer that merges all ``observers``."""
        merged = self._items[key].module.quantizer.observer()
        for observer in observers:
            merged.merge(observer)
        return attrs.evolve(self._items[key], observer=merged)

    def _give_common(self, keys: Iterable[Key], members: Sequence[Observation]) -> None:
        """Merge the observed ranges of all members, and set the scales of ``keys`` from the merged range."""
        for key in keys:
            self._give(key, self._merged(key, (member.observer for member in members)).qparams())

    def _give(self, key: Key, qparams: QParams) -> None:
        self._items[key].module.set_qparams(qparams)
        self._done.add(key)

    def _give_cache(self, wanted: Key, members: Sequence[Key], observed: Mapping[Key, Observation]) -> None:
        """Compute the largest scale of all members, and set it as the scale of the observed members.

        Scales that are already set are not changed.
        """
        new = [key for key in members if key not in self._done and (key == wanted or observed[key].has_seen)]
        qparams_of = {key: observed[key].qparams() for key in new}
        known = [scale for key in members if key in self._done and (scale := self._items[key].module.scale) is not None]
        scale = merge_kv_scales([*(q.scale for q in qparams_of.values()), *known], self._floor)
        for key, qparams in qparams_of.items():
            self._give(key, QParams(scale.clone(), qparams.zero_point))

    def _hook(self, owner: str, slot: str) -> Any:
        """Return a hook for a layer.

        If it is registered as a pre-hook, it observes the layer's input. As a forward hook, it observes the
        output.
        """

        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor | None = None) -> None:
            if is_counted():
                self.see(owner, slot, args[0] if output is None else output)

        return hook

    @torch.no_grad()
    def _see_attention(self, owner: str, tensors: Mapping[str, Tensor]) -> bool:
        if is_counted():
            for attribute, x in tensors.items():
                self.see(owner, attribute, x)
        return False
