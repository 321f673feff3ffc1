"""The names in AMD Quark's public modules. Each name has a reference to an object of this project.

`quark_amd.finder` creates the modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["IN_EXAMPLES", "NAMES", "WITH_NAMES_OF_PLUGINS"]


def _of(module: str, *names: str, **renamed: str) -> dict[str, str]:
    """Return a dictionary from a name in AMD Quark to a reference ``"module:attribute"`` in this project."""
    return {name: f"{module}:{name}" for name in names} | {name: f"{module}:{ours}" for name, ours in renamed.items()}


_CHECKPOINTS = _of("quark.checkpoint", "export_safetensors", "import_model_from_safetensors") | _of(
    "quark_amd.model_exporter", "ModelExporter"
)
_EXPORT_CONFIGS = _of("quark_amd.export_config", "ExporterConfig", "JsonExporterConfig", "OnnxExporterConfig")
_OTHER_FORMS = _of("quark_amd.model_exporter", "export_gguf", "export_onnx")
_QUANTIZER = _of("quark.runs", "ModelQuantizer")
_LOAD, _SAVE = (_of("quark_amd.parameters", name) for name in ("load_params", "save_params"))
_OPTIONS = _of("quark_amd.not_offered", "RuntimeOptions")
_CONFIGS = (
    _of("quark.config.model", "QConfig", Config="QConfig")
    | _of("quark.config.layer", "QLayerConfig", QuantizationConfig="QLayerConfig")
    | _of("quark.config.tensor", "QTensorConfig", QuantizationSpec="QTensorConfig")
    | _of(
        "quark_amd.algorithm_settings",
        "load_quant_algo_config_from_file",
        load_pre_optimization_config_from_file="load_quant_algo_config_from_file",
    )
)
_OBSERVERS = _of("quark.numbers.observer", ObserverBase="Observer")

NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "quark.torch": _CHECKPOINTS
        | _OTHER_FORMS
        | _QUANTIZER
        | _LOAD
        | _SAVE
        | _OPTIONS
        | _of("quark_amd.not_offered", "disable_native_inference", "enable_native_inference")
        | _of("quark.config.templates", "LLMTemplate")
        | _of("quark.config.enums", "QuantFlow"),
        "quark.torch.algorithm": {},
        "quark.torch.export": _CHECKPOINTS | _EXPORT_CONFIGS,
        "quark.torch.export.api": _CHECKPOINTS
        | _OTHER_FORMS
        | _SAVE
        | _of("quark.checkpoint", _map_to_quark="map_to_quark")
        | _of("quark_amd.not_offered", _move_quantizer_to_dict="move_quantizer_to_dict"),
        "quark.torch.export.config.config": _EXPORT_CONFIGS,
        "quark.torch.export.main_export.quant_config_parser": _of(
            "quark_amd.quant_config_parser", "QuantConfigParser", "get_layer_quant_config"
        ),
        "quark.torch.quantization": _CONFIGS,
        "quark.torch.quantization.api": _QUANTIZER | _LOAD,
        "quark.torch.quantization.config.algo_configs": _of(
            "quark_amd.algorithm_settings", "get_algo_config", "get_supported_algorithm_types"
        ),
        "quark.torch.quantization.config.config": _CONFIGS | _of("quark.config.algorithm", "AlgoConfig", PreQuantOptConfig="AlgoConfig"),
        "quark.torch.quantization.config.template": _of(
            "quark.config.templates", "LLMTemplate", "QuantizationScheme", "QuantizationSchemeCollection"
        )
        | _of(
            "quark_amd.default_templates",
            "DEFAULT_TEMPLATES",
            _create_template_from_config="template_from_dict",
            _resolve_projection_base_spec="projection_base",
            _ATTN_TOKENS="ATTENTION_TOKENS",
        ),
        "quark.torch.quantization.config.type": _of(
            "quark.config.enums",
            "DeviceType",
            "Dtype",
            "QSchemeType",
            "QuantFlow",
            "QuantizationMode",
            "RoundType",
            "ScaleType",
            "ZeroPointType",
        ),
        "quark.torch.quantization.nn.modules.quantize_linear": _of("quark.models.layers", "QuantLinear"),
        "quark.torch.quantization.observer": _OBSERVERS,
        "quark.torch.quantization.observer.observer": _OBSERVERS,
        "quark.torch.quantization.utils": _OPTIONS,
        "quark.torch.quantization.weight_convert": _of(
            "transformers.core_model_loading",
            "Concatenate",
            "ConversionOps",
            "SkipParameters",
            "Transpose",
            "WeightConverter",
            "WeightTransform",
            "process_target_pattern",
        )
        | _of("quark.models.hf.weight_converters", "Chunk", "SplitFusedExperts"),
    }
)
"""Public module → name → reference.

Names that start with an underscore can be imported but are not listed.
"""
WITH_NAMES_OF_PLUGINS = frozenset(
    {
        "quark.torch.quantization",
        "quark.torch.quantization.config.config",
        "quark.torch.quantization.config.template",
        "quark.torch.quantization.observer",
        "quark.torch.quantization.observer.observer",
    }
)
"""Modules that also have the names that records of plugins export without a module, such as
``Int4PerGroupSpec``.
"""
IN_EXAMPLES: Mapping[str, str] = MappingProxyType(
    {
        "quark.common.profiler": "amd_quark_scripts.profiler",
        "quark.common.utils.import_utils": "amd_quark_scripts.installed_packages",
        "quark.common.utils.log": "amd_quark_scripts.loggers",
        "quark.contrib.llm_eval": "amd_quark_scripts.evaluation",
        "quark.contrib.llm_eval.evaluation": "amd_quark_scripts.evaluation",
        "quark.scripts.quantize_quark": "amd_quark_scripts.quantize_quark",
        "quark.shares.utils.import_utils": "amd_quark_scripts.installed_packages",
        "quark.shares.utils.log": "amd_quark_scripts.loggers",
        "quark.torch.utils": "amd_quark_scripts.model_access",
        "quark.torch.utils.device": "amd_quark_scripts.model_access",
        "quark.torch.utils.llm": "amd_quark_scripts.llm",
        "quark.torch.utils.llm.data_preparation": "amd_quark_scripts.data_preparation",
        "quark.torch.utils.llm.model_preparation": "amd_quark_scripts.model_preparation",
    }
)
"""Public module that AMD Quark's example scripts import → module of the distribution in
``examples/from_amd_quark``.
"""
