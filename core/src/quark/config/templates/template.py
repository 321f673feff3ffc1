"""`LLMTemplate` builds the configuration of a model from the name of a scheme, if the family is known."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from quark.base.lazy import LazyRef, ObjectRef
from quark.base.log import get_logger
from quark.base.names import closest
from quark.config.algorithm import AlgoConfig
from quark.config.architecture import Architecture
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.templates.algorithms import (
    by_algorithm,
    canonical_algorithm,
    derived_config,
    legacy_settings,
    refusal,
    require_processor,
    with_options,
)
from quark.config.templates.projections import with_quantized_attention, with_quantized_cache
from quark.config.templates.schemes import (
    RUN_TIME_SUMMARY,
    QuantizationScheme,
    QuantizationSchemeCollection,
    scheme_config,
    scheme_part,
    scheme_record,
)
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError, UnknownNameError, UnsupportedError
from quark.plugins import TemplateRecord, algorithms, templates
from quark.plugins.model_records import RunTimeTemplate

_QKV = ("q_proj", "k_proj", "v_proj")
"""Suffixes of projections that share a global scale if a family does not state its own, as in AMD Quark."""


PATTERNS = ("kv_layers_name", "q_layer_name", "gate_up_layers_name", "exclude_layers_name")
"""Patterns of layers that are arguments of a template and also fields of an `Architecture`."""
_MAKE_CONVERTERS = LazyRef("quark.models.hf.weight_converters:make_converters")
"""A lazy reference, because the module imports torch. Templates need it only if a family has converters."""


def _list(value: str | Sequence[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def _one_of(name: str, value: Any, old_name: str, old_value: Any) -> Any:
    """Return the value of an argument with a new and an old name. Raise ConfigError if both are passed."""
    if value is not None and old_value is not None:
        raise ConfigError(f"LLMTemplate got both {name} and its old name {old_name}: pass only {name}")
    return old_value if value is None else value


class LLMTemplate:
    """A template for the models of one family. It builds the configuration of a model from a scheme's name.

    Plugins provide the templates of known families, as `quark.config.architecture.Architecture` objects. A
    program may register further templates.

    Args:
        model_type: ``config.model_type`` of the family.
        kv_layers_name: Patterns of the projections whose outputs enter the KV cache. None means that the
            template does not support a quantized cache.
        q_layer_name: Pattern, or patterns, of the query projections.
        gate_up_layers_name: Suffixes of the two MLP input projections. None means ``gate_proj`` and
            ``up_proj``.
        exclude_layers_name: Patterns of layers that stay float.
        algorithm_configs: Mapping from the name of an algorithm, in upper or lower case, to its settings.
        f2f_weight_converters: Converters (`quark.models.hf.weight_converters`). With or without calibration
            data, `quark.runs.quantize_checkpoint` applies them to stored tensors before any other step.
        kv_layer_name: Old name of ``kv_layers_name``.
        exclude_layers: Old name of ``exclude_layers_name``.
        architecture: Further facts about the family.
        legacy_algorithm_parameters: Keywords of the form ``<algorithm>_config``. Older programs use them
            instead of ``algorithm_configs``. quark logs a warning for them.

    Raises:
        ConfigError: (a ValueError) A keyword or an algorithm is unknown, or an argument is passed under both
            its new and its old name.

    Example:
        >>> from quark.config.templates import LLMTemplate
        >>> patterns = {"kv_layers_name": ["*k_proj", "*v_proj"], "exclude_layers_name": ["lm_head"]}
        >>> template = LLMTemplate(model_type="acme", **patterns)
        >>> template.get_config(scheme="fp8", kv_cache_scheme="fp8").exclude
        ['lm_head']
    """

    _made: ClassVar[dict[str, tuple[tuple[TemplateRecord, object, tuple[int, int]], LLMTemplate]]] = {}

    def __init__(
        self,
        model_type: str,
        kv_layers_name: Sequence[str] | None = None,
        q_layer_name: str | Sequence[str] | None = None,
        gate_up_layers_name: Sequence[str] | None = None,
        exclude_layers_name: Sequence[str] = (),
        algorithm_configs: Mapping[str, AlgoConfig | None] | None = None,
        f2f_weight_converters: Sequence[Any] | None = None,
        *,
        kv_layer_name: Sequence[str] | None = None,
        exclude_layers: Sequence[str] | None = None,
        architecture: Architecture | None = None,
        **legacy_algorithm_parameters: AlgoConfig | None,
    ) -> None:
        kv_layers = _one_of("kv_layers_name", kv_layers_name, "kv_layer_name", kv_layer_name)
        excluded = _one_of("exclude_layers_name", exclude_layers_name or None, "exclude_layers", exclude_layers)
        self.model_type = model_type
        self.kv_layers_name = None if kv_layers is None else _list(kv_layers)
        self.q_layer_name = q_layer_name if q_layer_name is None or isinstance(q_layer_name, str) else list(q_layer_name)
        self.gate_up_layers_name = ["gate_proj", "up_proj"] if gate_up_layers_name is None else list(gate_up_layers_name)
        self.exclude_layers_name = _list(excluded)
        self.f2f_weight_converters = None if f2f_weight_converters is None else list(f2f_weight_converters)
        self.architecture = architecture
        self._derived: Mapping[str, AlgoConfig | None] = {}
        self.algo_config: dict[str, AlgoConfig | None] = dict.fromkeys(algorithms().names())
        self.algo_config |= legacy_settings(legacy_algorithm_parameters)
        self.algo_config |= by_algorithm(algorithm_configs, "`algorithm_configs`")

    def __repr__(self) -> str:
        return f"LLMTemplate(model_type={self.model_type!r}, kv_layers_name={self.kv_layers_name}, exclude={self.exclude_layers_name})"

    @property
    def algorithm_configs(self) -> dict[str, AlgoConfig | None]:
        """Mapping from the name of an algorithm to its settings. ``algo_config`` is the same object."""
        return self.algo_config

    @classmethod
    def from_architecture(cls, architecture: Architecture) -> LLMTemplate:
        """Return the template of the family that ``architecture`` describes.

        Each installed algorithm derives its settings from ``architecture``.
        """
        derived = {name: derived_config(name, architecture) for name in algorithms().names()}
        patterns = {name: getattr(architecture, name) for name in PATTERNS}
        converters = list(_MAKE_CONVERTERS.load()(architecture.weight_converters)) if architecture.weight_converters else None
        template = cls(
            architecture.model_type, **patterns, algorithm_configs=derived, f2f_weight_converters=converters, architecture=architecture
        )
        template._derived = derived
        return template

    @classmethod
    def list_available(cls) -> list[str]:
        """Return the model types that have a template.

        The list begins with the sorted types from plugins. Then follow types that the program has registered.
        """
        plugins = templates().plugin_names()
        return [*plugins, *(name for name in templates().run_time_names() if name not in plugins)]

    @classmethod
    def register_template(cls, template: LLMTemplate) -> None:
        """Register a template for the rest of this process.

        If there is a template for the same model type, log a warning and replace it.

        Raises:
            ConfigError: (a ValueError) The model type of the template is not text, or contains a colon.
        """
        registry, name = templates(), template.model_type
        facts = template.architecture
        replaced = registry.get(name) if name in registry else None
        reference = ObjectRef(facts) if facts is not None else getattr(replaced, "architecture", None)
        if isinstance(replaced, RunTimeTemplate):
            replaces = replaced.replaces
        else:
            replaces = None if replaced is None else registry.source(name).distribution
        try:
            record = RunTimeTemplate(name=name, summary=RUN_TIME_SUMMARY, architecture=reference, replaces=replaces, template=template)
        except ValueError as error:
            raise ConfigError(f"this template cannot be registered: {error}") from None
        if replaced is not None:
            get_logger(__name__).warning(
                f"Template '{name}' already registered, will overwrite the existing template for the rest of this process."
            )
        if isinstance(replaced, RunTimeTemplate):
            registry.unregister(name)
        registry.register(record)

    @classmethod
    def get(cls, model_type: str) -> LLMTemplate:
        """Return the template of a model type.

        Args:
            model_type: ``model.config.model_type``. If the model has no such attribute, pass the first entry
                of ``model.config.architectures``.

        Raises:
            UnknownNameError: (a ValueError) There is no such template. The message lists all templates, and
                says how to add one.
        """
        try:
            record = templates().get(model_type)
        except UnknownNameError as error:
            available = cls.list_available()
            near = closest(str(model_type), available)
            hint = f" Did you mean '{near}'?" if near else ""
            failed = "".join(f". A plugin failed: {failure}" for failure in templates().failures())
            raise UnknownNameError(
                f"There is no model template defined for the model type '{model_type}'.{hint} Available templates: {', '.join(available)}. "
                f"To add one: LLMTemplate.register_template(LLMTemplate(model_type='{model_type}', kv_layers_name=[…], "
                f"exclude_layers_name=[…])), or a plugin's quark_register_templates{failed}",
                kind="template",
                name=str(model_type),
                known=available,
            ) from error
        if isinstance(record, RunTimeTemplate):
            return cast("LLMTemplate", record.template)
        registry = algorithms()
        source = (record, registry, registry.revision)  # a template contains settings of every registered algorithm
        cached = cls._made.get(record.name)
        if cached is None or cached[0] != source:
            cached = cls._made[record.name] = (source, cls.from_architecture(templates().load_architecture(model_type)))
        return cached[1]

    @classmethod
    def register_scheme(cls, scheme_name: str, config: QLayerConfig) -> None:
        """Make a scheme available to every template in this process.

        Raises:
            ConfigError: (a ValueError) Another scheme has this name.
        """
        QuantizationSchemeCollection().register_scheme(scheme_name, QuantizationScheme(config))

    @classmethod
    def unregister_scheme(cls, scheme_name: str) -> None:
        """Remove a scheme that `register_scheme` added.

        Raises:
            ConfigError: (a ValueError) There is no such scheme, or it comes from a plugin.
        """
        QuantizationSchemeCollection().unregister_scheme(scheme_name)

    @classmethod
    def get_supported_schemes(cls) -> list[str]:
        """Return the names of all schemes, from plugins and from registrations in this process."""
        return QuantizationSchemeCollection().get_supported_schemes()

    def get_config(
        self,
        scheme: str,
        algorithm: str | Sequence[str] | None = None,
        kv_cache_scheme: str | None = None,
        min_kv_scale: float = 0.0,
        attention_scheme: str | None = None,
        layer_config: Mapping[str, str] | None = None,
        layer_type_config: Mapping[Any, str] | None = None,
        exclude_layers: Sequence[str] | None = None,
        algo_configs: Mapping[str, AlgoConfig] | None = None,
        shared_scale_groups: Sequence[Sequence[str]] | None = None,
        *,
        kv_cache_post_rope: bool | None = None,
        attention_post_rope: bool | None = None,
        scheme_options: Mapping[str, Any] | None = None,
        algorithm_options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> QConfig:
        """Return a new `QConfig` for a whole model.

        The result contains the settings objects in ``algo_configs`` themselves, and copies of everything
        else.

        Args:
            scheme: Name of the scheme of all linear layers.
            algorithm: Name or names of the algorithms to apply, in order.
            kv_cache_scheme: Name of a scheme for the KV cache.
            min_kv_scale: Lower limit for the scales of the KV cache. 0.0 means no limit.
            attention_scheme: Name of a scheme for attention probabilities and queries.
            layer_config: Mapping from a pattern of layer names to a scheme's name. The first pattern that
                matches a layer decides.
            layer_type_config: Mapping from a layer type, which is a torch class or its name, to a scheme's
                name. It applies to layers that no pattern in ``layer_config`` matches.
            exclude_layers: Patterns of layers that stay float. They replace the template's patterns. ``[]``
                quantizes all layers.
            algo_configs: Mapping from the name of an algorithm to settings. They replace the template's
                settings.
            shared_scale_groups: Groups of name suffixes. The layers of a group share a global scale. They
                replace the scheme's groups. ``[]`` means no groups.
            kv_cache_post_rope: If True, keys and values are rounded at the inputs of attention, which
                runtimes cache. If False, they are rounded at the outputs of the projections, as in AMD Quark.
                None means True if the model can use quark's attention functions.
            attention_post_rope: The same choice for the queries that ``attention_scheme`` quantizes.
            scheme_options: Mapping from the name of an option of ``scheme`` to its value, such as
                ``{"block_size": 32}``. ``quark schemes NAME`` lists the options.
            algorithm_options: Mapping from an algorithm to its options, such as
                ``{"gptq": {"damp_percent": 0.05}}``. ``quark algorithms NAME`` lists the options.

        Raises:
            UnknownNameError: (a ValueError) There is no such scheme or algorithm. Or ``kv_cache_scheme`` or
                ``attention_scheme`` names a scheme that is not for this purpose.
            UnsupportedError: (a NotImplementedError) The algorithm cannot run, or has no settings for this
                family.
            ConfigError: (a ValueError) An option is unknown or has the wrong type. Or ``kv_cache_scheme`` is
                set, but the template has no ``kv_layers_name``.
        """
        record = scheme_record(scheme)
        shares = record.shares_global_scale and shared_scale_groups is None
        config = QConfig(
            global_quant_config=scheme_config(scheme, scheme_options),
            min_kv_scale=min_kv_scale,
            exclude=self._with_modules(self.exclude_layers_name if exclude_layers is None else exclude_layers),
            algo_config=self._algorithms(algorithm, algo_configs, algorithm_options),
            layer_quant_config={pattern: scheme_config(name) for pattern, name in (layer_config or {}).items()},
            layer_type_quant_config={kind: scheme_config(name) for kind, name in (layer_type_config or {}).items()},
            kv_cache_group=self._with_modules(self.kv_layers_name),
            shared_scale_groups=self._scale_groups() if shares else [list(group) for group in shared_scale_groups or ()],
            sync_moe_expert_input_amax=shares,
            kv_cache_post_rope=kv_cache_post_rope,
            scheme=record.name,
            attention_post_rope=attention_post_rope,
        )
        return self._with_attention(config, kv_cache_scheme, attention_scheme)

    def _scale_groups(self) -> list[list[str]]:
        """Return two groups of suffixes whose layers share a global scale: (q, k, v) and (gate, up)."""
        facts = self.architecture
        roles = () if facts is None else (facts.query_projections, facts.key_projections, facts.value_projections)
        suffixes = [{name.rpartition(".")[2] for name in names or ()} for names in roles]
        is_stated = bool(suffixes) and all(len(names) == 1 for names in suffixes)
        return [[name for names in suffixes for name in names] if is_stated else list(_QKV), list(self.gate_up_layers_name)]

    def _with_attention(self, config: QConfig, kv_cache_scheme: str | None, attention_scheme: str | None) -> QConfig:
        """Return ``config``, with the schemes for the KV cache and for attention added if they are set."""
        if kv_cache_scheme:
            spec = scheme_part(kv_cache_scheme, "kv_cache", "KV cache scheme")
            if not self.kv_layers_name:
                raise ConfigError(
                    f"the cache of '{self.model_type}' cannot be quantized: its template has no kv_layers_name. Make one with "
                    f"LLMTemplate(model_type='{self.model_type}', kv_layers_name=['*k_proj', '*v_proj'], …), or leave kv_cache_scheme out"
                )
            config = with_quantized_cache(config, self._with_modules(self.kv_layers_name), spec, self.architecture)
        if attention_scheme:
            probabilities = scheme_part(attention_scheme, "attention", "attention scheme")
            assert isinstance(probabilities, QTensorConfig)
            config = with_quantized_attention(config, self._with_modules(self.q_layer_name), probabilities, self.architecture)
        return config

    def _algorithms(
        self,
        algorithm: str | Sequence[str] | None,
        algo_configs: Mapping[str, AlgoConfig] | None,
        algorithm_options: Mapping[str, Mapping[str, Any]] | None,
    ) -> list[AlgoConfig] | None:
        settings = self.algo_config | by_algorithm(algo_configs, "`algo_configs`")
        names = [canonical_algorithm(name) for name in _list(algorithm)]
        options = {canonical_algorithm(name): values for name, values in (algorithm_options or {}).items()}
        if idle := [name for name in options if name not in names]:
            applied = f"this run applies {', '.join(names)}" if names else "this run applies none"
            raise ConfigError(f"there are options for the algorithm '{idle[0]}', but {applied}: name '{idle[0]}' as an algorithm too")
        chosen = []
        for name in names:
            require_processor(name)
            own = settings.get(name)
            if own is None:
                reason = refusal(name, self.architecture) if self.architecture else None
                raise UnsupportedError(
                    f"No built-in {name} configuration is available for the '{self.model_type}' architecture"
                    f"{f': {reason}' if reason else ''}. "
                    f"Pass your own to get_config: algo_configs={{'{name}': …}}; on the command line, --template-file takes a JSON file "
                    "with the names of the family's modules"
                )
            # All configurations of the family share derived settings, so the settings are copied. Settings
            # that a caller passed are not copied.
            own = copy.deepcopy(own) if own is self._derived.get(name) else own
            chosen.append(with_options(name, own, options[name]) if name in options else own)
        return chosen or None

    def _with_modules(self, patterns: str | Sequence[str] | None) -> list[str]:
        return self.architecture.with_modules(_list(patterns)) if self.architecture else _list(patterns)


def template_for(model_config: Any) -> LLMTemplate:
    """Return the template for the model that a configuration describes.

    Args:
        model_config: A transformers configuration, or the content of a ``config.json`` as a dictionary.

    Raises:
        ConfigError: The configuration has neither a model type nor an architecture.
        UnknownNameError: (a ValueError) There is no template for the model type.
    """
    read = model_config.get if isinstance(model_config, Mapping) else lambda key: getattr(model_config, key, None)
    model_type = read("model_type") or next(iter(read("architectures") or ()), None)
    if not model_type:
        raise ConfigError("this model configuration has neither 'model_type' nor 'architectures', so its family is unknown: add one")
    return LLMTemplate.get(model_type)
