"""Equalization: the base class of SmoothQuant and AWQ. It folds scales into the mappings of each block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import chain
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import (
    AbsMax,
    BlockContext,
    Metrics,
    ResolvedSettings,
    Transform,
    TransformRun,
    input_is_transformed,
    validated,
)
from quark.base.log import get_logger
from quark.base.scalars import numbers
from quark.config.algorithm import AlgoConfig
from quark.config.architecture import Architecture
from quark.models.layers.quantized_layers import linear_weight
from quark.models.plan.family import text_config
from quark.models.plan.quant_plan import QuantPlan
from quark_algos.equalization.config import AutoSmoothQuantConfig, AWQConfig, SmoothQuantConfig
from quark_algos.equalization.inputs import ChannelRanges
from quark_algos.equalization.search import AbsMeanOfSample
from quark_algos.mappings.fold import SavedParameters, allowed, fold, holds, probe
from quark_algos.mappings.mapping import LayerMapping, mappings_of
from quark_algos.mappings.resolve import ResolvedMapping, resolve
from quark_algos.mappings.user_mappings import UserMapping, check_user_mappings, skipped_mappings, user_mappings_of

__all__ = ["Equalization", "EqualizationRun"]

_PROBE_MARGIN = 16
"""A mapping is skipped if probe scales change the output by more than this multiple of the tolerance.

The number is above 1, because the rounding errors of a whole block accumulate.
"""


class Equalization(Transform, ABC):
    """Folds scales into the layers of each mapping of a block, and compares the block's error on held-out
    tokens before and after.

    Before a mapping is used for the first time, it is tested with random scales. If these scales change the
    output of the block, the model differs from the facts of its architecture. The mapping is then skipped
    with a warning. If the scales of a block do not reduce the output error of the block by more than a
    standard error, the preset ``"best"`` restores the weights. The preset ``"reference"`` leaves the scaled
    weights in the model and logs a warning.

    Args:
        settings: An `AWQConfig`, `SmoothQuantConfig` or `AutoSmoothQuantConfig`.

    Attributes:
        preset: The preset of the settings.
        user_entries: The ``scaling_layers`` of the settings. If they are empty, all mappings of the
            architecture are used.

    Raises:
        ConfigError: An entry of ``scaling_layers`` is incomplete, or the condition in an entry has a wrong
            form.
    """

    def __init__(self, settings: AlgoConfig) -> None:
        assert isinstance(settings, AWQConfig | SmoothQuantConfig | AutoSmoothQuantConfig)  # the classes in the records
        self._settings = settings
        self.preset = settings.preset
        self.user_entries = tuple(settings.scaling_layers or [])
        user_mappings_of(list(self.user_entries), ())  # raises errors in the settings before any work is done

    def resolve_for_model(self, model: nn.Module, plan: QuantPlan) -> ResolvedSettings:
        """Return the settings unchanged, together with notes for the plan.

        There is one note for each mapping that some blocks do not have.

        Raises:
            ConfigError: None of the user mappings applies to any block of the model.
        """
        facts, heads = plan.architecture, _heads_of(model)
        if facts is None:
            return ResolvedSettings(self._settings)
        check_user_mappings(user_mappings_of(list(self.user_entries), mappings_of(facts)), model, facts, heads)
        return ResolvedSettings(self._settings, skipped_mappings(self.mappings(facts), model, facts, heads))

    def start(self, model: nn.Module, plan: QuantPlan) -> EqualizationRun:
        """Return the run for a model. Nothing outside the blocks is changed."""
        return EqualizationRun(self, _heads_of(model))

    def mappings(self, facts: Architecture) -> tuple[UserMapping, ...]:
        """Return the user mappings, or all mappings of the architecture if there are no user mappings."""
        known = mappings_of(facts)
        return user_mappings_of(list(self.user_entries) or [mapping.documented() for mapping in known], known)

    @abstractmethod
    def scale(self, modules: ResolvedMapping, block: BlockContext) -> Tensor | None:
        """Return the scales of a mapping, ``[C]``.

        Return None if no token has reached a quantized balance layer of the mapping.
        """

    def _read(self, modules: ResolvedMapping, block: BlockContext) -> dict[str, nn.Module]:
        """Return a dictionary from name to balance layer.

        It has only the layers that are quantized and that at least one token has reached.
        """
        return {n: m for n, m in modules.balance_layers.items() if n in block.configs and n in block.statistics}

    def _combined(self, modules: ResolvedMapping, block: BlockContext, kind: type[AbsMax | AbsMeanOfSample | ChannelRanges]) -> Tensor:
        """Return, for each input channel, the maximum of a statistic over the balance layers, ``[K]``.

        If the balance layers are experts, their statistics differ, because experts get different tokens.
        """
        values = [s.value for n in self._read(modules, block) if (s := block.statistic(n, kind)) is not None]
        return torch.stack(values).amax(0)


class EqualizationRun(TransformRun):
    """The run of an `Equalization` on one model.

    Args:
        transform: The transform. It chooses the mappings and the scales of each mapping.
        heads: Number of query heads of the model's attention.
    """

    def __init__(self, transform: Equalization, heads: int) -> None:
        self._transform = transform
        self._heads = heads
        self._refused: set[LayerMapping] = set()
        self._probed: set[LayerMapping] = set()

    @torch.no_grad()
    def apply(self, block: BlockContext) -> Mapping[str, Metrics]:
        """Fold scales into the layers of each mapping of a block, and return metrics.

        With the preset "best", the weights are restored if the output error does not decrease.
        """
        before = block.output_error() if block.output_error else None
        saved: list[SavedParameters] = []
        skipped: dict[str, Metrics] = {}
        scaled: dict[str, Metrics] = {}
        is_compared = False
        for modules in self._mappings(block):
            name = f"{block.name}.{modules.name}".lstrip(".")
            rotated = [n for n, layer in modules.balance_layers.items() if input_is_transformed(layer)]
            if rotated:
                skipped[name] = {"left_out": f"an online rotation changes the input of {rotated[0]}"}
                continue
            scale = self._transform.scale(modules, block)
            is_compared |= scale is not None
            smallest, largest = (1.0, 1.0) if scale is None else numbers(scale.min(), scale.max())
            if scale is not None and not smallest == largest == 1:
                saved.append(SavedParameters.of(modules))
                fold(modules, scale)
                scaled[name] = {"scale_min": smallest, "scale_max": largest}
        metrics = skipped | scaled
        if not saved:
            reason = "the best scales are all 1" if is_compared else "no mapping of this block can be scaled"
            return metrics | {block.name: {"applied": False, "reason": reason}}
        if before is None or block.output_error is None:
            return metrics | {block.name: {"applied": True}}
        validation = validated([before], [block.output_error()])
        if not validation.is_improvement and self._transform.preset == "best":
            for parameters in reversed(saved):
                parameters.restore()
            reason = "it does not reduce the output error by more than a standard error"
            return skipped | {block.name: {**validation.metrics(), "applied": False, "reason": reason}}
        if not validation.is_improvement:
            get_logger(__name__).warning(
                f"'{block.name}': equalization changes the output error of the rounded block by a factor of {validation.factor:.2f} on "
                f"{validation.tokens} held-out tokens ({validation.before:.2g} to {validation.after:.2g}, standard error "
                f"{validation.standard_error:.1g}). With preset='best', equalization would be left out here"
            )
        return metrics | {block.name: {**validation.metrics(), "applied": True}}

    def learned(self) -> dict[str, Any]:
        """Return the mappings that were tested and the mappings that were refused. See
        `TransformRun.learned`.
        """
        return {"probed": [attrs.asdict(m) for m in self._probed], "refused": [attrs.asdict(m) for m in self._refused]}

    def recall(self, learned: Mapping[str, Any]) -> None:
        """Restore the state that `learned` returned. See `quark.algorithms.TransformRun.recall`."""
        self._probed, self._refused = ({LayerMapping(**fields) for fields in learned[name]} for name in ("probed", "refused"))

    def _mappings(self, block: BlockContext) -> list[ResolvedMapping]:
        """Return the mappings that apply to a block.

        At least one balance layer of each mapping is quantized.
        """
        mappings: list[ResolvedMapping] = []
        output: list[Tensor] = []  # the block's output before changes; computed only if a mapping is tested
        for entry in self._transform.mappings(block.architecture):
            mapping = entry.mapping
            if mapping in self._refused or (entry.condition is not None and not entry.condition.holds(block.module)):
                continue
            results = (resolve(m, block.module, block.architecture, self._heads) for m in entry.mappings_in(block.module))
            resolved = chain.from_iterable(result for result in results if not isinstance(result, str))
            quantized = [m for m in resolved if any(name in block.configs for name in m.balance_layers)]
            is_rotated = any(input_is_transformed(layer) for m in quantized for layer in m.balance_layers.values())
            if quantized and not is_rotated and mapping not in self._probed and not self._is_sound(quantized[0], block, mapping, output):
                continue
            mappings += quantized
        return mappings

    def _is_sound(self, modules: ResolvedMapping, block: BlockContext, mapping: LayerMapping, output: list[Tensor]) -> bool:
        """Return whether scales of the mapping leave the block's output unchanged.

        If the output changes, the mapping is skipped in this block and in all later blocks. ``output`` is a
        list that stores the output of the unchanged block. If it is empty, the output is computed and
        appended.
        """
        if block.output is None:
            return True
        self._probed.add(mapping)
        dtype = linear_weight(next(iter(modules.balance_layers.values()))).dtype
        if not output:
            output.append(block.output())
        change = holds(modules, probe(modules), block.output, output[0])
        if change <= _PROBE_MARGIN * allowed(modules, dtype):
            return True
        self._refused.add(mapping)
        get_logger(__name__).warning(
            f"'{block.name}.{modules.name}' is not equalized, because a scale there changes the block's output (by {change:.1e}). "
            f"The model differs from its template. Correct the template, or set scaling_layers"
        )
        return False


def _heads_of(model: nn.Module) -> int:
    """Return the number of query heads of a model, or 1 if its configuration does not state the number."""
    return int(getattr(text_config(model), "num_attention_heads", 1) or 1)
