"""The rules of a configuration and how many layers each matches; a rule without effect is reported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
from torch import nn

from quark.base.names import closest, folded, matches
from quark.config.architecture import Architecture
from quark.config.model import QConfig
from quark.models.layers.layer_types import layer_type_of_class, planned_names
from quark.models.layers.quantized_layers import counts_as
from quark.models.plan.rules import first_match

__all__ = ["Rule", "rules_of"]

_FIELDS = ("exclude", "layer_quant_config", "kv_cache_quant_config")


@attrs.frozen
class Rule:
    """A pattern or layer type of a configuration, and how many layers of one model it matches.

    Attributes:
        field: The field of `QConfig`, such as ``"exclude"``.
        rule: The pattern, or the name of the type.
        layers: The number of quantizable layers that the rule matches; for ``exclude``, if there are none,
            the number of other modules.
        problem: Why the rule has no effect, in a sentence; empty if it has one, or comes from the model's own
            template.
    """

    field: str
    rule: str
    layers: int
    problem: str = ""


def rules_of(model: nn.Module, config: QConfig, architecture: Architecture | None = None) -> tuple[Rule, ...]:
    """Return a `Rule` for every pattern and layer type of a configuration, with its matches in ``model``."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return (*_patterns(modules, config, architecture), *_types(modules, config))


def _patterns(modules: Mapping[str, nn.Module], config: QConfig, architecture: Architecture | None) -> Iterator[Rule]:
    """Yield a rule for each pattern.

    Patterns of the model's own template may match nothing, as long as one cache pattern matches.
    """
    layers = [name for name, module in modules.items() if counts_as(module) is not None]
    template_excludes = set(architecture.with_modules(architecture.exclude_layers_name)) if architecture else set()
    template_cache = set(architecture.with_modules(architecture.kv_layers_name or ())) if architecture else set()
    if not any(_count(pattern, layers) for pattern in template_cache):
        template_cache = set()
    deciding = _deciding(layers, config)
    optional = {"exclude": template_excludes, "layer_quant_config": template_cache, "kv_cache_quant_config": template_cache}
    for field in _FIELDS:
        for pattern in getattr(config, field):
            count = _count(pattern, layers) or (_count(pattern, modules) if field == "exclude" else 0)
            problem = "" if count else _unmatched(field, pattern, layers)
            if count and field == "layer_quant_config" and pattern not in deciding:
                problem = _overruled(pattern, layers, config)
            problem = "" if pattern in optional[field] else problem
            yield Rule(field, pattern, count, problem)


def _deciding(layers: Sequence[str], config: QConfig) -> set[str | None]:
    """Return the patterns of ``layer_quant_config`` that decide for a layer."""
    return {first_match(name, config.layer_quant_config) for name in layers if first_match(name, config.exclude) is None}


def _overruled(pattern: str, layers: Sequence[str], config: QConfig) -> str:
    """Return the sentence about a pattern that matches layers for all of which other rules decide."""
    names = [name for name in layers if matches(name, pattern)]
    rules = {(first_match(n, config.exclude), first_match(n, config.layer_quant_config)) for n in names}
    others = sorted({f"exclude '{excluded}'" if excluded else f"the pattern '{first}' before it" for excluded, first in rules})
    return (
        f"the pattern '{pattern}' in layer_quant_config has no effect: what it matches, {folded(names)}, goes by {' and '.join(others)}. "
        "Take that out, or the pattern"
    )


def _unmatched(field: str, pattern: str, layers: Sequence[str]) -> str:
    near = _nearest(pattern, layers)
    hint = f"did you mean '{near}'?" if near else f"a layer of this model is '{layers[-1]}'" if layers else "this model has none"
    return f"the pattern '{pattern}' in {field} matches no layer that can be quantized, and has no effect; {hint}"


def _nearest(pattern: str, layers: Sequence[str]) -> str | None:
    """Return the layer name, cut to the pattern's number of parts, that is closest to the pattern.

    Wildcards of the pattern do not count.
    """
    words = pattern.replace("*", "").strip(".")
    parts = words.count(".") + 1
    return closest(words, dict.fromkeys(".".join(name.split(".")[-parts:]) for name in layers))


def _types(modules: Mapping[str, nn.Module], config: QConfig) -> Iterator[Rule]:
    supported = planned_names()
    for key in config.layer_type_quant_config:
        name = key if isinstance(key, str) else key.__name__
        if name in supported and (isinstance(key, str) or layer_type_of_class(key) is not None):
            count = sum(1 for m in modules.values() if (kind := counts_as(m)) is not None and kind.__name__ == name)
            problem = f"layer_type_quant_config names {name}, but this model has no layer of that type"
        else:
            matches = [n for n, m in modules.items() if (type(m).__name__ == key if isinstance(key, str) else type(m) is key)]
            count, which = 0, f"{len(matches)} layer(s) stay float: {folded(matches)}" if matches else "this model has no such layer"
            problem = (
                f"layer_type_quant_config names {name}, which has no matrix of weights to quantize or is not supported; {which}. "
                f"Supported types are {', '.join(supported)}"
            )
        yield Rule("layer_type_quant_config", name, count, "" if count else problem)


def _count(pattern: str, names: Sequence[str] | Mapping[str, nn.Module]) -> int:
    return sum(matches(name, pattern) for name in names)
