"""AMD Quark's import paths: their objects, names of plugins, and errors if one is missing."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys

import pytest

from quark.errors import MissingPluginError
from quark.plugins import Catalog, Source, using

PATHS = {
    "quark.torch": [
        "LLMTemplate",
        "ModelExporter",
        "ModelQuantizer",
        "QuantFlow",
        "RuntimeOptions",
        "export_gguf",
        "export_onnx",
        "export_safetensors",
        "import_model_from_safetensors",
        "load_params",
        "save_params",
    ],
    "quark.torch.quantization.api": ["ModelQuantizer", "load_params"],
    "quark.torch.quantization.utils": ["RuntimeOptions"],
    "quark.torch.quantization.observer": ["ObserverBase", "PerTensorMinMaxObserver"],
    "quark.torch.algorithm.api": ["blockwise_tuning_algo"],
    "quark.torch.algorithm.config": ["BlockwiseJointTuningConfig", "BlockwiseTuningConfig"],
    "quark.experimental.torch.autoround": ["AutoRoundProcessor"],
    "quark.torch.quantization": [
        "AWQConfig",
        "AutoSmoothQuantConfig",
        "Config",
        "GPTQConfig",
        "OnlineRotationConfig",
        "QConfig",
        "QLayerConfig",
        "QTensorConfig",
        "QuantizationConfig",
        "QuantizationSpec",
        "RotationConfig",
        "SmoothQuantConfig",
        "load_pre_optimization_config_from_file",
        "load_quant_algo_config_from_file",
    ],
    "quark.torch.quantization.config.config": ["AlgoConfig", "Config", "GPTAQConfig", "QConfig", "QronosConfig", "QuaRotConfig"],
    "quark.torch.quantization.config.type": [
        "DeviceType",
        "Dtype",
        "QSchemeType",
        "QuantFlow",
        "QuantizationMode",
        "RoundType",
        "ScaleType",
        "ZeroPointType",
    ],
    "quark.torch.quantization.config.template": [
        "DEFAULT_TEMPLATES",
        "LLMTemplate",
        "QuantizationScheme",
        "QuantizationSchemeCollection",
    ],
    "quark.torch.quantization.config.algo_configs": ["get_algo_config", "get_supported_algorithm_types"],
    "quark.torch.quantization.nn.modules.quantize_linear": ["QuantLinear"],
    "quark.torch.quantization.observer.observer": ["ObserverBase"],
    "quark.torch.quantization.weight_convert": ["Chunk", "Concatenate", "ConversionOps", "SplitFusedExperts", "WeightConverter"],
    "quark.torch.export": ["ExporterConfig", "JsonExporterConfig", "ModelExporter", "OnnxExporterConfig", "export_safetensors"],
    "quark.torch.export.api": [
        "ModelExporter",
        "export_gguf",
        "export_onnx",
        "export_safetensors",
        "import_model_from_safetensors",
        "save_params",
    ],
    "quark.torch.export.config.config": ["ExporterConfig", "JsonExporterConfig"],
    "quark.torch.export.main_export.quant_config_parser": ["QuantConfigParser", "get_layer_quant_config"],
    "quark.torch.algorithm.awq.awq": ["AwqProcessor"],
    "quark.torch.algorithm.awq.smooth": ["SmoothQuantProcessor"],
    "quark.torch.algorithm.awq.auto_smooth": ["AutoSmoothQuantProcessor"],
    "quark.torch.algorithm.gptq.gptq": ["GptqProcessor"],
    "quark.torch.algorithm.gptaq.gptaq": ["GptaqProcessor"],
    "quark.torch.algorithm.qronos.qronos": ["QronosProcessor"],
    "quark.torch.algorithm.rotation.rotation": ["RotationProcessor"],
}
SEED_SPECS = [
    "BFP16Spec", "AmdFP4Spec", "Bfloat16Spec", "FP4PerGroupSpec", "FP8E4M3PerChannelSpec", "FP8E4M3PerGroupSpec", "FP8E4M3PerTensorSpec",
    "FP8E5M2PerChannelSpec", "FP8E5M2PerGroupSpec", "FP8E5M2PerTensorSpec", "FP8E5M3PerTensorSpec", "Float16Spec", "Int4PerChannelSpec",
    "Int4PerGroupSpec", "Int4PerTensorSpec", "Int8PerChannelSpec", "Int8PerGroupSpec", "Int8PerTensorSpec", "MX6Spec", "MX9Spec",
    "OCP_MXFP4Spec", "OCP_MXFP6E2M3Spec", "OCP_MXFP6E3M2Spec", "OCP_MXFP8E4M3Spec", "OCP_MXFP8E5M2Spec", "OCP_MXINT8Spec",
    "ProgressiveSpec", "ScaleQuantSpec", "Uint4PerChannelSpec", "Uint4PerGroupSpec", "Uint4PerTensorSpec", "Uint8PerChannelSpec",
    "Uint8PerGroupSpec", "Uint8PerTensorSpec",
]  # fmt: skip
SEED_OBSERVERS = [
    "PlaceholderObserver", "PerTensorMinMaxObserver", "PerChannelMinMaxObserver", "PerGroupMinMaxObserver", "PerBlockMXObserver",
]  # fmt: skip
SEED_SCHEMES = [
    "AmdFP4GlobalScaleScheme", "AmdFP4Scheme", "BFP16Scheme", "FP4Block16ScaleE4M3Scheme", "FP8Scheme", "INT4_FP8Scheme",
    "Int4WeightAndActivationScheme", "Int4WeightOnlyPerChannelScheme", "Int4WeightOnlyScheme", "Int8Scheme", "MX6Scheme", "MXFP4Scheme",
    "MXFP4WeightOnlyScheme", "MXFP4_FP8Scheme", "MXFP4_MXFP6E2M3Scheme", "MXFP6E2M3Scheme", "MXFP6E3M2Scheme", "PTPCFP8Scheme",
    "Uint4WeightOnlyPerChannelScheme", "Uint4WeightOnlyScheme",
]  # fmt: skip


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in PATHS.items() for name in names])
def test_a_documented_name_is_importable_from_its_documented_path(module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name) is not None
    assert name in dir(importlib.import_module(module))
    assert name in importlib.import_module(module).__all__


@pytest.mark.parametrize("name", SEED_SPECS)
@pytest.mark.parametrize("module", ["quark.torch.quantization", "quark.torch.quantization.config.config"])
def test_a_spec_class_of_the_seeds_is_found(module: str, name: str) -> None:
    assert inspect.isclass(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("name", SEED_OBSERVERS)
def test_an_observer_of_the_seeds_is_found(name: str) -> None:
    from quark.torch.quantization.observer import observer

    assert issubclass(getattr(observer, name), observer.ObserverBase)


@pytest.mark.parametrize("name", SEED_SCHEMES)
def test_a_scheme_class_of_the_seeds_is_found(name: str) -> None:
    from quark.torch.quantization.config import template

    assert issubclass(getattr(template, name), template.QuantizationScheme)


def test_all_generations_are_one_class() -> None:
    from quark.torch.quantization import Config, QConfig, QLayerConfig, QTensorConfig, QuantizationConfig, QuantizationSpec
    from quark.torch.quantization.config import config

    assert Config is QConfig is config.Config is config.QConfig
    assert QuantizationConfig is QLayerConfig is config.QuantizationConfig
    assert QuantizationSpec is QTensorConfig is config.QuantizationSpec


def test_a_star_import_brings_plugins_names_too() -> None:
    names = importlib.import_module("quark.torch.quantization").__all__
    assert {"AWQConfig", "QConfig"} <= set(names)
    assert not {"Any", "annotations", "documented_name"} & set(names)
    assert all(hasattr(importlib.import_module("quark.torch.quantization"), name) for name in names)


def test_a_misspelt_name_of_an_installed_plugin_is_an_attribute_error_with_the_closest_name() -> None:
    from quark.torch import quantization

    with pytest.raises(AttributeError, match="did you mean 'AWQConfig'"):
        quantization.AWKConfig


@pytest.mark.parametrize("module", list(PATHS)[:7])
def test_other_unknown_names_are_plain_attribute_errors(module: str) -> None:
    assert not hasattr(importlib.import_module(module), "nonsense")
    assert not hasattr(importlib.import_module(module), "_nonsense")


def test_a_module_that_no_plugin_documents_does_not_exist() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("quark.torch.nonsense")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("quark.torch.algorithm.nonsense")


def test_a_scale_type_knows_its_torch_dtype() -> None:
    import torch

    from quark.torch.quantization.config.type import ScaleType

    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8_e5m3": torch.uint8, "float8_e8m0fnu": torch.float8_e8m0fnu}
    assert {name: ScaleType[name].to_torch_dtype() for name in names} == names
    for name in ("float", "pof2"):
        with pytest.raises(ValueError, match=f"ScaleType.{name} says how scales are computed"):
            ScaleType[name].to_torch_dtype()


def test_the_documented_processors_are_there() -> None:
    from quark.torch.algorithm.awq.awq import AwqProcessor
    from quark.torch.algorithm.gptq.gptq import GptqProcessor
    from quark.torch.quantization import AWQConfig

    assert AwqProcessor is not GptqProcessor
    with pytest.raises(ValueError, match=r"Set model\.quant_config"):
        AwqProcessor(None, AWQConfig(), None)


def output_of(code: str, **environment: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("disabled", "statement"),
    [
        ("quark-algos", "from quark.torch.quantization import AWQConfig"),
        ("quark-algos", "from quark.torch.algorithm.awq.awq import AwqProcessor"),
        ("quark-algos", "import quark.torch.algorithm.gptq"),
        ("quark-schemes", "from quark.torch.quantization.config.config import Int4PerGroupSpec"),
        ("quark-schemes", "from quark.torch.quantization.observer.observer import PerTensorMinMaxObserver"),
        ("quark-schemes", "from quark.torch.quantization.config.template import FP8Scheme"),
    ],
)
def test_a_name_of_a_plugin_that_is_not_active_says_why(disabled: str, statement: str) -> None:
    code = f"import quark.torch\ntry:\n    {statement}\nexcept ImportError as error:\n    print(error)"
    assert f"QUARK_DISABLED_PLUGINS leaves out plugin '{disabled.removeprefix('quark-')}' of {disabled}" in output_of(
        code, QUARK_DISABLED_PLUGINS=disabled
    )


def test_a_name_of_a_plugin_that_is_not_installed_says_what_to_install() -> None:
    from quark.torch import quantization

    with using(Catalog()):
        for name in ("AWQConfig", "Int4PerGroupSpec"):
            vars(quantization).pop(name, None)
            with pytest.raises(MissingPluginError, match=rf"provides quark\.torch\.quantization\.{name}\..*pip install quark-algos\."):
                getattr(quantization, name)
        with pytest.raises(MissingPluginError, match="pip install quark-algos"):
            importlib.import_module("quark.torch.algorithm.nonsense")


def test_a_name_of_a_plugin_that_failed_says_what_failed() -> None:
    from quark.torch import quantization

    broken = Catalog()
    broken.add(object(), Source("quark-algos", "1.0", "m", "algos"))
    with using(broken), pytest.raises(MissingPluginError, match=r"plugin 'algos' of quark-algos 1\.0 \(m\) failed at stage 'register'"):
        quantization.NoSuchConfig


def test_importing_the_facade_loads_neither_transformers_nor_plugins() -> None:
    code = "import sys, quark.torch; print({m.partition('.')[0] for m in sys.modules} & {'transformers', 'quark_schemes', 'quark_algos'})"
    assert output_of(code).strip() == "set()"
