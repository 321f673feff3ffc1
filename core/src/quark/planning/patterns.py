"""The rules of a configuration and how many layers each matches; a rule that can have no effect is told of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import attrs
from torch import nn

from quark.config.architecture import Architecture
from quark.config.model import QConfig
from quark.modules.layer_types import layer_type_of_class, planned_names
from quark.modules.layers import counts_as
from quark.names import closest, folded

__all__ = ["Rule", "rules_of"]

_FIELDS = ("exclude", "layer_quant_config", "kv_cache_quant_config")


@attrs.frozen
class Rule:
    """A pattern, or a layer type, and what it matches in one model.

    Attributes:
        field: Of `QConfig`, such as ``"exclude"``.
        rule: The pattern, or the name of the type.
        layers: How many layers that could be quantized it matches; of ``exclude``, where those are none, how many other modules.
        problem: Why it can have no effect, in a sentence; empty where it has one, or comes from the model's own template.
    """

    field: str
    rule: str
    layers: int
    problem: str = ""


def rules_of(model: nn.Module, config: QConfig, architecture: Architecture | None = None) -> tuple[Rule, ...]:
    """Every pattern and layer type of a configuration, with what it matches in ``model``."""
    modules = dict(model.named_modules())
    return (*_patterns(modules, config, architecture), *_types(modules, config))


def _patterns(modules: Mapping[str, nn.Module], config: QConfig, architecture: Architecture | None) -> Iterator[Rule]:
    """Those that the model's own template brings may match nothing, as long as one of them does."""
    layers = [name for name, module in modules.items() if counts_as(module) is not None]
    own = set(architecture.with_modules(architecture.exclude_layers_name)) if architecture else set()
    cache = set(architecture.with_modules(architecture.kv_layers_name or ())) if architecture else set()
    if not any(_count(pattern, layers) for pattern in cache):
        cache = set()
    forgiven = {"exclude": own, "layer_quant_config": cache, "kv_cache_quant_config": cache}
    for field in _FIELDS:
        for pattern in getattr(config, field):
            count = _count(pattern, layers) or (_count(pattern, modules) if field == "exclude" else 0)
            problem = "" if count or pattern in forgiven[field] else _unmatched(field, pattern, layers)
            yield Rule(field, pattern, count, problem)


def _unmatched(field: str, pattern: str, layers: Sequence[str]) -> str:
    near = _nearest(pattern, layers)
    hint = f"did you mean '{near}'?" if near else f"a layer of this model is '{layers[-1]}'" if layers else "this model has none"
    return f"the pattern '{pattern}' in {field} matches no layer that can be quantized, and has no effect; {hint}"


def _nearest(pattern: str, layers: Sequence[str]) -> str | None:
    """What looks most like a pattern without its wildcards: the last part of a layer's name, or a whole name where it names more."""
    words = pattern.replace("*", "").strip(".")
    parts = words.count(".") + 1
    return closest(words, dict.fromkeys(".".join(name.split(".")[-parts:]) for name in layers))


def _types(modules: Mapping[str, nn.Module], config: QConfig) -> Iterator[Rule]:
    supported = planned_names()
    for key in config.layer_type_quant_config:
        name = key if isinstance(key, str) else key.__name__
        if name in supported and (isinstance(key, str) or layer_type_of_class(key) is not None):
            count = sum(1 for m in modules.values() if (kind := counts_as(m)) is not None and kind.__name__ == name)
            problem = f"layer_type_quant_config names {name}, of which this model has no layer"
        else:
            found = [n for n, m in modules.items() if (type(m).__name__ == key if isinstance(key, str) else type(m) is key)]
            count, which = 0, f"{len(found)} layer(s) stay float: {folded(found)}" if found else "this model has no such layer"
            problem = (
                f"layer_type_quant_config names {name}, which has no matrix of weights to quantize or is not supported; {which}. "
                f"Supported types are {', '.join(supported)}"
            )
        yield Rule("layer_type_quant_config", name, count, "" if count else problem)


def _count(pattern: str, names: Sequence[str] | Mapping[str, nn.Module]) -> int:
    return sum(fnmatchcase(name, pattern) for name in names)
