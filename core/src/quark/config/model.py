"""`QConfig` says how a model is quantized. In AMD Quark, its names are ``Config`` and ``QConfig``."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from quark.base.names import has_wildcard
from quark.base.version import VERSION
from quark.config.algorithm import AlgoConfig, StoredAlgoConfig
from quark.config.enums import QuantFlow, QuantizationMode
from quark.config.fields import checked, strings_of, value_of, with_dataclass_view
from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError

__all__ = ["QConfig"]

_RUN = "run_time_algorithms"
_MOST_PATTERNS = 10_000
"""Maximum number of patterns in each field of a configuration from a file.

Templates have a few dozen patterns. Exports list full names instead of patterns.
"""


def _algorithms(value: Any) -> list[AlgoConfig] | None:
    """Return the settings of algorithms as a list. If ``value`` is a single object, return a list with it.

    In AMD Quark before 0.10, this value was a single object.
    """
    if value is None:
        return None
    if isinstance(value, Iterable) and not isinstance(value, str | Mapping):
        return list(value)
    return [value]


def _copied_dict(value: Mapping[Any, QLayerConfig] | None) -> dict[Any, QLayerConfig]:
    return dict(value or {})


def _copied_list(value: Iterable[Any] | None) -> list[Any]:
    if isinstance(value, str):
        raise ConfigError(f"patterns must be a list, not the single string {value!r}: write [{value!r}]")
    return list(value or [])


def _layer(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, QLayerConfig):
        raise ConfigError(f"{attribute.name} must be a QLayerConfig, not {value!r}")


def _scale_floor(_: Any, attribute: Any, value: float) -> None:
    if value < 0:
        raise ConfigError(f"{attribute.name}={value} is negative: write a positive scale, or 0.0 for no lower limit")


def _by_type_name(layers: Mapping[Any, QLayerConfig]) -> dict[str, QLayerConfig]:
    """Return a copy of ``layers``. If a key is a torch class, the copy has the name of the class instead."""
    return {key if isinstance(key, str) else key.__name__: layer for key, layer in layers.items()}


def _copied_layers(layers: Mapping[Any, QLayerConfig]) -> dict[Any, QLayerConfig]:
    return {key: layer.copied() for key, layer in layers.items()}


@with_dataclass_view
@attrs.define
class QConfig:
    """The quantization of a whole model.

    Lists and dicts that you pass are copied, so two configurations never share them. You can assign to every
    field, including the fields of the configurations of layers and tensors. A run works on a copy (`copied`).
    So a run does not change your configuration. After a run is planned, your changes have no effect on it.

    The following fields are tried in this order, and the first field that applies to a layer determines the
    layer's quantization: ``exclude`` (the layer stays float), ``layer_quant_config`` (the first pattern that
    matches counts), ``layer_type_quant_config`` and ``global_quant_config``. ``kv_cache_quant_config``
    quantizes outputs, including the outputs of excluded layers.

    Attributes:
        global_quant_config: Configuration of every linear layer to which no other field applies.
        exclude: Patterns (``fnmatch``) of modules whose weights and inputs stay float.
        algo_config: Settings of the algorithms, in the order in which they run. A single object counts as a
            list with one item.
        log_severity_level: This field exists for compatibility with AMD Quark. It has no effect.
        version: Version of the program that wrote this configuration.
        layer_type_quant_config: Mapping from a module type to the configuration of layers of this type. A
            type is a torch class or the name of this class.
        layer_quant_config: Mapping from a pattern of module names to the configuration of the layers that
            match. If several patterns match a layer, the first one counts.
        kv_cache_quant_config: Mapping from a pattern of key and value projections to a configuration. The
            ``output_tensors`` of this configuration quantize the KV cache.
        kv_cache_group: Patterns of the projections whose outputs enter the KV cache.
        min_kv_scale: Lower limit for the scales of the KV cache.
        separate_kv_scales: Whether keys and values have their own scales. If False, the keys and values of a
            block share the larger of the two scales, as in AMD Quark.
        kv_cache_post_rope: Where keys and values are rounded, and where the exported scales of the cache are
            computed. True means at the inputs of attention, after norms of single heads and the rotary
            embedding. Runtimes such as vLLM cache these inputs. False means at the outputs of the
            projections, as in AMD Quark. None means True if the model can use quark's attention functions,
            and False otherwise. Latent attention requires False, because runtimes do not cache the outputs
            of its projections.
        attention_post_rope: The same choice for the queries if attention is quantized
            (``softmax_quant_spec``).
        shared_scale_groups: Groups of name suffixes. The layers of a group share one global scale.
        softmax_quant_spec: Configuration of the attention probabilities. None leaves them unquantized.
        quant_mode: The way in which a model is quantized: layer by layer (eager mode), or in a mode that a
            plugin registers. The distribution quark-graph provides FX graph mode, which quantizes operators.
        quant_flow: This field exists for compatibility with AMD Quark. quark runs the same pipeline for every
            value.
        gpu_resident_blocks: This field exists for compatibility with AMD Quark. It has no effect.
        sync_moe_expert_input_amax: Whether all experts of a block use the same range for their inputs.
        activation_memory: Number of bytes that the activations of all samples inside a block may occupy
            during calibrated rounding. None means half of the free memory. If the activations need more
            memory, each block runs twice instead. With 0, each block always runs twice.
        spill_directory: Directory for temporary files. If the inputs of the blocks need more than
            ``activation_memory``, the rest of the inputs is written to this directory. With None, all inputs
            stay in memory. The directory does not change the result.
        strict: Whether quark raises an error if a pattern matches no layer, or if a layer type cannot be
            quantized. If False, quark logs a warning instead.
        calibrate_all_experts: Whether every expert is calibrated on every token. If False, an expert is
            calibrated only on the tokens that the router sends to it.
        scheme: Name of the scheme that defines ``global_quant_config``, for messages. It is not part of the
            JSON form.
        keep_prequantized_layers: Whether layers that this configuration does not quantize stay quantized if
            they are quantized in the source checkpoint. If True, these layers keep their codes, scales and
            configuration. If False, they are dequantized and written as float.
        weight_format: Format of the weights in the checkpoint from which this configuration was read. In the
            format ``"fake_quantized"``, the checkpoint contains rounded values instead of codes.
        written_with: Distributions that provided the formats, observers and algorithms when a checkpoint was
            written (`quark.checkpoint.provenance`).
        pre_quant_opt_config: Algorithms that run before the algorithms in ``algo_config``. AMD Quark before
            0.12 has this field. quark moves these algorithms to the front of ``algo_config`` and sets the
            field to None.
    """

    global_quant_config: QLayerConfig = attrs.field(validator=_layer)
    exclude: list[str] = attrs.field(factory=list, converter=_copied_list)
    algo_config: list[AlgoConfig] | None = attrs.field(default=None, converter=_algorithms)
    log_severity_level: int = 1
    version: str = VERSION
    layer_type_quant_config: dict[Any, QLayerConfig] = attrs.field(factory=dict, converter=_copied_dict, eq=_by_type_name)
    layer_quant_config: dict[str, QLayerConfig] = attrs.field(factory=dict, converter=_copied_dict)
    kv_cache_quant_config: dict[str, QLayerConfig] = attrs.field(factory=dict, converter=_copied_dict)
    kv_cache_group: list[str] = attrs.field(factory=list, converter=_copied_list)
    min_kv_scale: float = attrs.field(default=0.0, validator=_scale_floor)
    separate_kv_scales: bool = attrs.field(default=False, kw_only=True)
    calibrate_all_experts: bool = attrs.field(default=False, kw_only=True)
    strict: bool = attrs.field(default=False, kw_only=True)
    weight_format: str = attrs.field(default="real_quantized", kw_only=True, eq=False, repr=False)
    activation_memory: int | None = attrs.field(default=None, kw_only=True)
    spill_directory: str | None = attrs.field(default=None, kw_only=True, eq=False)
    scheme: str | None = attrs.field(default=None, kw_only=True, eq=False, repr=False)
    kv_cache_post_rope: bool | None = None
    attention_post_rope: bool | None = attrs.field(default=None, kw_only=True)
    shared_scale_groups: list[list[str]] = attrs.field(factory=list, converter=_copied_list)
    softmax_quant_spec: QTensorConfig | None = None
    quant_mode: QuantizationMode = attrs.field(default=QuantizationMode.eager_mode, converter=QuantizationMode)
    quant_flow: QuantFlow = QuantFlow.standard
    gpu_resident_blocks: int = 0
    sync_moe_expert_input_amax: bool = False
    keep_prequantized_layers: bool = True
    pre_quant_opt_config: Any = attrs.field(default=None, repr=False, eq=False)
    written_with: Any = attrs.field(default=None, repr=False, eq=False, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.pre_quant_opt_config is not None:
            first = _algorithms(self.pre_quant_opt_config) or []
            self.algo_config = first + (self.algo_config or [])
            self.pre_quant_opt_config = None

    def copied(self) -> QConfig:
        """Return an independent copy, including the configurations of all tensors.

        Raise ConfigError if values that you have assigned to fields contradict each other.
        """
        return attrs.evolve(
            self,
            global_quant_config=self.global_quant_config.copied(),
            algo_config=copy.deepcopy(self.algo_config),
            layer_type_quant_config=_copied_layers(self.layer_type_quant_config),
            layer_quant_config=_copied_layers(self.layer_quant_config),
            kv_cache_quant_config=_copied_layers(self.kv_cache_quant_config),
            shared_scale_groups=[list(group) for group in self.shared_scale_groups],
            softmax_quant_spec=None if self.softmax_quant_spec is None else self.softmax_quant_spec.copied(),
        )

    @staticmethod
    def with_llm_template(template: Any, scheme: str, **options: Any) -> QConfig:
        """Return ``template.get_config(scheme=scheme, **options)``. ``template`` is an `LLMTemplate`."""
        return template.get_config(scheme=scheme, **options)

    @property
    def run_time_algorithms(self) -> list[str]:
        """Names of algorithms that add modules to the quantized model, in the order of ``algo_config``."""
        return [a.name for a in self.algo_config or () if a.runs_with_model()]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form. It is the ``quantization_config`` of a checkpoint without the key ``export``.

        The exporter adds ``export``. AMD Quark does not have the keys ``run_time_algorithms`` and
        ``attention_post_rope``, and ignores them. The JSON form has ``run_time_algorithms`` only if an
        algorithm adds modules that run as part of the model. It has ``attention_post_rope`` only if the value
        is not None.
        """
        softmax = self.softmax_quant_spec
        run = self.run_time_algorithms
        return {
            "global_quant_config": self.global_quant_config.to_dict(),
            "exclude": list(self.exclude),
            "algo_config": None if self.algo_config is None else [a.to_dict() for a in self.algo_config],
            "softmax_quant_spec": None if softmax is None else softmax.to_dict(),
            "quant_method": "quark",
            "layer_type_quant_config": _to_dicts(_by_type_name(self.layer_type_quant_config)),
            "layer_quant_config": _to_dicts(self.layer_quant_config),
            "kv_cache_quant_config": _to_dicts(self.kv_cache_quant_config),
            "kv_cache_post_rope": self.kv_cache_post_rope,
            "quant_mode": self.quant_mode.name,
            "version": self.version,
            **({_RUN: run} if run else {}),
            **({} if self.attention_post_rope is None else {"attention_post_rope": self.attention_post_rope}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QConfig:
        """Create a configuration from a JSON form that any version has written.

        If a key is missing or its value is null, the field gets its default. Unknown keys are ignored.
        Entries of ``algo_config`` become `StoredAlgoConfig` objects, so that a checkpoint can be read even
        if its algorithms are not installed.

        Raises:
            ConfigError: ``global_quant_config`` is missing, a value has the wrong type, or there are too many
                patterns.
        """
        if not isinstance(data, Mapping) or data.get("global_quant_config") is None:
            raise ConfigError("this quantization_config has no 'global_quant_config': it was not written by quark, or is damaged")
        _refuse_many_patterns(data)
        export = value_of(data, "export", Mapping, {})
        softmax = data.get("softmax_quant_spec")
        return cls(
            global_quant_config=QLayerConfig.from_dict(value_of(data, "global_quant_config", Mapping)),
            exclude=strings_of(data, "exclude"),
            algo_config=_stored_algorithms(data.get("algo_config"), strings_of(data, _RUN)),
            version=str(data.get("version") or VERSION),
            layer_type_quant_config=_layers(data, "layer_type_quant_config"),
            layer_quant_config=_layers(data, "layer_quant_config"),
            kv_cache_quant_config=_layers(data, "kv_cache_quant_config"),
            kv_cache_group=strings_of(export, "kv_cache_group"),
            min_kv_scale=float(value_of(export, "min_kv_scale", float, 0.0)),
            weight_format=value_of(export, "weight_format", str, "real_quantized"),
            # Checkpoints without the key are older than rounding after RoPE; null lets the model decide.
            kv_cache_post_rope=value_of(data, "kv_cache_post_rope", bool, None if "kv_cache_post_rope" in data else False),
            attention_post_rope=value_of(data, "attention_post_rope", bool),
            softmax_quant_spec=None if softmax is None else QTensorConfig.from_dict(softmax),
            quant_mode=QuantizationMode.from_str(value_of(data, "quant_mode", str, "eager_mode")),
            written_with=data.get("plugins"),
        )


def _refuse_many_patterns(data: Mapping[str, Any]) -> None:
    """Raise ConfigError if there are so many patterns that a comparison with all layers would take minutes.

    A full name without wildcards does not count as a pattern. Exports list full names.
    """
    for key in ("exclude", "layer_quant_config", "kv_cache_quant_config"):
        values = data.get(key)
        count = sum(isinstance(v, str) and has_wildcard(v) for v in values) if isinstance(values, list | tuple | Mapping) else 0
        if count > _MOST_PATTERNS:
            raise ConfigError(
                f"'{key}' has {count:,} patterns with wildcards, and at most {_MOST_PATTERNS:,} are read: write full names of layers"
            )


def _stored_algorithms(value: Any, run: Sequence[str]) -> list[AlgoConfig] | None:
    """Return the settings of algorithms in ``value``, or None if there are none.

    Args:
        value: The ``algo_config`` of a checkpoint. This is a list, None, or a single object if the version is
            before 0.10.
        run: Names of the algorithms whose modules run as part of the model.
    """
    if value is None:
        return None
    entries = [value] if isinstance(value, Mapping) else checked(value, list, "algo_config")
    settings = [checked(entry, Mapping, "algo_config") for entry in entries]
    return [StoredAlgoConfig.from_dict(dict(s), is_run=value_of(s, "name", str, "") in run) for s in settings]


def _to_dicts(layers: Mapping[str, QLayerConfig]) -> dict[str, Any]:
    return {name: layer.to_dict() for name, layer in layers.items()}


def _layers(data: Mapping[str, Any], key: str) -> dict[str, QLayerConfig]:
    return {name: QLayerConfig.from_dict(value) for name, value in value_of(data, key, Mapping, {}).items()}
