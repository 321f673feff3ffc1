"""The rules of a configuration: which rule decides for a layer, and which rules have no effect.

The order of precedence is defined only here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
from torch import nn

from quark.base.names import closest, folded, matches
from quark.config.architecture import Architecture
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.models.layers.layer_types import is_by_name, is_lookup, layer_type_of_class, planned_names
from quark.models.layers.quantized_layers import counts_as


@attrs.frozen
class Resolution:
    """The configuration of a layer, and the rule that decided it.

    ``config`` is None if the layer stays float.
    """

    config: QLayerConfig | None
    reason: str


def first_match(name: str, patterns: object) -> str | None:
    """Return the first pattern that matches a module's full name, case-sensitively; or None."""
    return next((p for p in patterns if matches(name, p)), None)  # type: ignore[attr-defined]


def layer_config_for(config: QConfig, name: str, planned_as: type[nn.Module], has_cache: bool = True) -> Resolution:
    """Return the quantization of the layer ``name`` and the rule that decided it.

    Precedence: ``exclude``, then ``layer_quant_config`` (first matching pattern), then
    ``layer_type_quant_config`` (exact type), then ``global_quant_config``, which never applies to embeddings
    and other types that are quantized by name. A match in ``kv_cache_quant_config`` adds its output
    quantization to the result, even to an excluded layer.

    Args:
        config: Configuration of the whole model.
        name: Full module name.
        planned_as: The class of the layer in plans.
        has_cache: Whether the layer is in a part of the model with a KV cache. A pattern such as ``*v_proj``
            does not show this: it also matches in a vision tower.
    """
    base = _without_cache(config, name, planned_as)
    if is_lookup(planned_as) and base.config is not None:
        # The input is indices, which cannot be quantized, and there is no bias. The rest of a scheme for
        # linear layers applies.
        own = QLayerConfig(weight=base.config.weight, output_tensors=base.config.output_tensors)
        return Resolution(_or_float(own), base.reason)
    pattern = first_match(name, config.kv_cache_quant_config)
    output = config.kv_cache_quant_config[pattern].output_tensors if pattern is not None else None
    if pattern is None or output is None:
        return base
    if not has_cache:
        # Templates repeat the cache's output quantization under the same pattern in layer_quant_config.
        if base.config != config.kv_cache_quant_config[pattern]:
            return base
        return Resolution(_or_float(attrs.evolve(config.kv_cache_quant_config[pattern], output_tensors=None)), base.reason)
    layer = attrs.evolve(base.config or QLayerConfig(), output_tensors=output)
    return Resolution(layer, f"{base.reason}; cache: {pattern}")


def _without_cache(config: QConfig, name: str, planned_as: type[nn.Module]) -> Resolution:
    def is_type(key: type | str) -> bool:
        return key is planned_as or key == planned_as.__name__

    unless_named = ""
    if is_by_name(planned_as):
        unless_named = "embeddings stay float unless named" if is_lookup(planned_as) else f"{planned_as.__name__} stays float unless named"
    return resolution(config, (name,), is_type, planned_as.__name__, unless_named)


def resolution(
    config: QConfig, names: Sequence[str], is_type: Callable[[type | str], bool], type_name: str, unless_named: str = ""
) -> Resolution:
    """Return the quantization of a layer or an operator by the rules that do not concern the KV cache.

    Args:
        config: Configuration of the whole model.
        names: The full name, and other names that patterns may use.
        is_type: Whether a key of ``layer_type_quant_config`` is its type.
        type_name: Its type, for the reason.
        unless_named: Why the global configuration does not apply to it; empty if it does.
    """

    def match(patterns: object) -> str | None:
        return next((pattern for name in names if (pattern := first_match(name, patterns)) is not None), None)

    if (pattern := match(config.exclude)) is not None:
        return Resolution(None, f"excluded: {pattern}")
    if (pattern := match(config.layer_quant_config)) is not None:
        return Resolution(_or_float(config.layer_quant_config[pattern]), f"pattern: {pattern}")
    for key, layer in config.layer_type_quant_config.items():
        if is_type(key):
            return Resolution(_or_float(layer), f"type: {type_name}")
    if unless_named:
        return Resolution(None, unless_named)
    return Resolution(_or_float(config.global_quant_config), "global")


def _or_float(layer: QLayerConfig) -> QLayerConfig | None:
    """Return the layer configuration, or None if it quantizes nothing."""
    return None if layer == QLayerConfig() else layer


_FIELDS = ("exclude", "layer_quant_config", "kv_cache_quant_config")


@attrs.frozen
class Rule:
    """A pattern or layer type of a configuration, and how many layers of one model it matches.

    Attributes:
        field: The field of `QConfig`, such as ``"exclude"``.
        rule: The pattern, or the name of the type.
        layers: The number of quantizable layers that the rule matches. If a pattern of ``exclude`` matches
            none, this is the number of other modules.
        problem: A sentence that says why the rule has no effect; empty if the rule has an effect, or comes
            from the model's own template.
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

    Patterns of the model's own template may match nothing, if one cache pattern matches.
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
    """Return the sentence about a pattern that has no effect, because other rules decide for its layers."""
    names = [name for name in layers if matches(name, pattern)]
    rules = {(first_match(n, config.exclude), first_match(n, config.layer_quant_config)) for n in names}
    others = sorted({f"exclude '{excluded}'" if excluded else f"the pattern '{first}' before it" for excluded, first in rules})
    return (
        f"the pattern '{pattern}' in layer_quant_config has no effect: all layers that it matches ({folded(names)}) are "
        f"decided by {' and '.join(others)}. Remove one of these rules"
    )


def _unmatched(field: str, pattern: str, layers: Sequence[str]) -> str:
    near = _nearest(pattern, layers)
    hint = f"did you mean '{near}'?" if near else f"a layer of this model is '{layers[-1]}'" if layers else "this model has none"
    return f"the pattern '{pattern}' in {field} matches no layer that can be quantized, and has no effect; {hint}"


def _nearest(pattern: str, layers: Sequence[str]) -> str | None:
    """Return the layer name, cut to the pattern's number of parts, that is closest to the pattern.

    The pattern's wildcards are ignored.
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
