"""Configurations from choices: a global scheme, patterns or names for others, exclusions for float."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod

import attrs

from quark.base.names import without_numbers
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.models.plan.plan_row import PlanRow
from quark.models.plan.rules import layer_config_for
from quark.plugins import layer_types
from quark_workbench.mixed_precision.candidates import Candidate

__all__ = ["configuration"]


def configuration(base: QConfig, rows: Sequence[PlanRow], chosen: Mapping[str, Candidate], fixed: Iterable[str]) -> QConfig:
    """Return ``base`` with another quantization of weight and input for the chosen layers.

    The outputs of layers, such as those that enter a quantized cache, stay what ``base`` makes them.

    Args:
        base: What every other layer gets.
        rows: All layers under ``base``.
        chosen: Candidate by full name of layer.
        fixed: Patterns of ``base.layer_quant_config`` that go before what is chosen.
    """
    weights: Counter[str] = Counter()
    for row in rows:
        if row.name in chosen and not chosen[row.name].is_float:
            weights[chosen[row.name].name] += prod(row.shape)
    most = next((name for name, _ in weights.most_common(1)), None)
    main = next((c for c in chosen.values() if c.name == most), None)
    pinned = {p: base.layer_quant_config[p] for p in fixed if p in base.layer_quant_config}
    rest = {p: layer for p, layer in base.layer_quant_config.items() if p not in pinned}
    wanted = {row.name: _layer(row, chosen[row.name]) for row in rows if row.name in chosen}
    config = attrs.evolve(
        base,
        global_quant_config=base.global_quant_config if main is None else main.config.copied(),
        scheme=base.scheme if main is None else main.name,
        layer_quant_config={**pinned, **rest},
    )
    wrong = {row.name: wanted[row.name] for row in rows if row.name in wanted and _resolved(config, row) != wanted[row.name]}
    names = [row.name for row in rows]
    floats = {name: layer for name, layer in wrong.items() if layer == QLayerConfig()}
    others = {name: layer for name, layer in wrong.items() if name not in floats}
    return attrs.evolve(
        config,
        exclude=[*config.exclude, *_patterns(floats, names)],
        layer_quant_config={**pinned, **_patterns(others, names), **rest},
    )


def _layer(row: PlanRow, candidate: Candidate) -> QLayerConfig:
    """Return the candidate's quantization of weight and input, with the output that the layer has anyhow."""
    output = None if row.config is None else row.config.output_tensors
    own = candidate.config.copied()
    return own if output is None else attrs.evolve(own, output_tensors=output)


def _resolved(config: QConfig, row: PlanRow) -> QLayerConfig:
    return layer_config_for(config, row.name, layer_types().load_layer(row.layer_type)).config or QLayerConfig()


def _patterns(layers: Mapping[str, QLayerConfig], names: Sequence[str]) -> dict[str, QLayerConfig]:
    """Return the layers by pattern where all layers of one kind have one quantization, else by exact name."""
    patterns: dict[str, QLayerConfig] = {}
    done: set[str] = set()
    for name, layer in layers.items():
        if name in done:
            continue
        pattern, same = without_numbers(name), [n for n, other in layers.items() if other == layer]
        matched = [n for n in names if fnmatchcase(n, pattern)]
        if len(matched) > 1 and set(matched) <= set(same):
            patterns[pattern] = layer.copied()
            done |= set(matched)
        else:
            patterns[name] = layer.copied()
    return patterns
