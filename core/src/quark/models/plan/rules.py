"""Functions that find the rule of a configuration that decides the quantization of a layer, and the rules
that have no effect.

Only this module defines the order of precedence of rules.
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
    """The configuration of a layer, and a text that names the rule that decided it.

    ``config`` is None if the layer stays float.
    """

    config: QLayerConfig | None
    reason: str


def first_match(name: str, patterns: object) -> str | None:
    """Return the first of ``patterns`` that matches ``name``, or None if no pattern matches.

    ``name`` is the full name of a module. The comparison is case-sensitive.
    """
    return next((p for p in patterns if matches(name, p)), None)  # type: ignore[attr-defined]


def layer_config_for(config: QConfig, name: str, planned_as: type[nn.Module], has_cache: bool = True) -> Resolution:
    """Return the quantization of the layer ``name`` and the rule that decided it.

    The first field that applies decides: ``exclude``, then ``layer_quant_config`` (the first pattern that
    matches), then ``layer_type_quant_config`` (the exact type), then ``global_quant_config``. The last field
    never applies to embeddings and other types that are quantized only if the configuration names them. If a
    pattern in ``kv_cache_quant_config`` matches, the output quantization of this pattern is added, even if
    the layer is excluded.

    Args:
        config: Configuration of the whole model.
        name: Full name of the layer.
        planned_as: Plans treat the layer as a layer of this class.
        has_cache: Whether the layer is in a part of the model that has a KV cache. If False,
            ``kv_cache_quant_config`` does not apply. For instance, its pattern ``*v_proj`` may also match
            layers of a vision tower, which has no KV cache.
    """
    base = _without_cache(config, name, planned_as)
    if is_lookup(planned_as) and base.config is not None:
        # An embedding has no bias, and its input is indices, which cannot be quantized. So only the specs of
        # the weight and the output apply.
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
    """Return the quantization of a layer by all rules except ``kv_cache_quant_config``."""

    def is_type(key: type | str) -> bool:
        return key is planned_as or key == planned_as.__name__

    unless_named = ""
    if is_by_name(planned_as):
        unless_named = "embeddings stay float unless named" if is_lookup(planned_as) else f"{planned_as.__name__} stays float unless named"
    return resolution(config, (name,), is_type, planned_as.__name__, unless_named)


def resolution(
    config: QConfig, names: Sequence[str], is_type: Callable[[type | str], bool], type_name: str, unless_named: str = ""
) -> Resolution:
    """Return the quantization of a layer or an operator by all rules except ``kv_cache_quant_config``.

    Args:
        config: Configuration of the whole model.
        names: The full name of the layer or operator, followed by other names that patterns may match.
        is_type: A function that returns whether a key of ``layer_type_quant_config`` is the type of the layer
            or operator.
        type_name: Name of the type of the layer or operator. The reason in the result contains this name.
        unless_named: The reason why the global configuration does not apply to the layer or operator. It is
            ``""`` if the global configuration applies.
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
    """Return ``layer``, or None if this configuration quantizes nothing."""
    return None if layer == QLayerConfig() else layer


_FIELDS = ("exclude", "layer_quant_config", "kv_cache_quant_config")


@attrs.frozen
class Rule:
    """A pattern or a layer type of a configuration, with the number of layers of one model that match it.

    Attributes:
        field: The field of `QConfig` that contains the rule, such as ``"exclude"``.
        rule: The pattern, or the name of the layer type.
        layers: The number of quantizable layers that the rule matches. If a pattern of ``exclude`` matches no
            quantizable layer, this is the number of other modules that it matches.
        problem: A sentence that says why the rule has no effect. It is empty if the rule has an effect, or if
            the rule comes from the template of the model.
    """

    field: str
    rule: str
    layers: int
    problem: str = ""


def rules_of(model: nn.Module, config: QConfig, architecture: Architecture | None = None) -> tuple[Rule, ...]:
    """Return a `Rule` for each pattern and each layer type of a configuration, applied to ``model``."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return (*_patterns(modules, config, architecture), *_types(modules, config))


def _patterns(modules: Mapping[str, nn.Module], config: QConfig, architecture: Architecture | None) -> Iterator[Rule]:
    """Yield a `Rule` for each pattern.

    If a pattern comes from the template of the model, ``problem`` is empty even if the pattern matches
    nothing. For patterns of the KV cache, this is so only if at least one of the template's patterns for the
    KV cache matches a layer.
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
    """Return the patterns of ``layer_quant_config`` that decide the quantization of at least one layer."""
    return {first_match(name, config.layer_quant_config) for name in layers if first_match(name, config.exclude) is None}


def _overruled(pattern: str, layers: Sequence[str], config: QConfig) -> str:
    """Return a sentence for a pattern that has no effect. It names the rules that decide for the layers that
    the pattern matches."""
    names = [name for name in layers if matches(name, pattern)]
    rules = {(first_match(n, config.exclude), first_match(n, config.layer_quant_config)) for n in names}
    others = sorted({f"exclude '{excluded}'" if excluded else f"the pattern '{first}' before it" for excluded, first in rules})
    return (
        f"the pattern '{pattern}' in layer_quant_config has no effect, because other rules decide for all layers that it matches "
        f"({folded(names)}): {' and '.join(others)}. Remove one of these rules"
    )


def _unmatched(field: str, pattern: str, layers: Sequence[str]) -> str:
    """Return a sentence that says that ``pattern`` matches no layer. If a layer has a similar name, the
    sentence names this layer."""
    near = _nearest(pattern, layers)
    hint = f"did you mean '{near}'?" if near else f"a layer of this model is '{layers[-1]}'" if layers else "this model has no such layer"
    return f"the pattern '{pattern}' in {field} matches no layer that can be quantized, so it has no effect; {hint}"


def _nearest(pattern: str, layers: Sequence[str]) -> str | None:
    """Return a pattern that matches a layer and is similar to ``pattern``. Return None if there is no similar
    name.

    The result is the name of a layer, or ``*`` followed by the last parts of a layer's name. These are as
    many parts as ``pattern`` has, and dots separate them. Wildcards in ``pattern`` are ignored.
    """
    words = pattern.replace("*", "").strip(".")
    parts = words.count(".") + 1
    near = closest(words, dict.fromkeys(".".join(name.split(".")[-parts:]) for name in layers))
    return near if near is None or near in layers else f"*{near}"


def _types(modules: Mapping[str, nn.Module], config: QConfig) -> Iterator[Rule]:
    """Yield a `Rule` for each key of ``layer_type_quant_config``."""
    supported = planned_names()
    for key in config.layer_type_quant_config:
        name = key if isinstance(key, str) else key.__name__
        if name in supported and (isinstance(key, str) or layer_type_of_class(key) is not None):
            count = sum(1 for m in modules.values() if (kind := counts_as(m)) is not None and kind.__name__ == name)
            problem = f"layer_type_quant_config names {name}, but this model has no layer of that type"
        else:
            matches = [n for n, m in modules.items() if (type(m).__name__ == key if isinstance(key, str) else type(m) is key)]
            count, which = 0, f"{len(matches)} layer(s) stay float: {folded(matches)}" if matches else "This model has no such layer"
            problem = (
                f"layer_type_quant_config names {name}, but this type has no weight matrix to quantize or is not supported. {which}. "
                f"Supported types are {', '.join(supported)}"
            )
        yield Rule("layer_type_quant_config", name, count, "" if count else problem)


def _count(pattern: str, names: Sequence[str] | Mapping[str, nn.Module]) -> int:
    """Return the number of ``names`` that ``pattern`` matches."""
    return sum(matches(name, pattern) for name in names)
