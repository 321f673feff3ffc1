"""The exporter ``onnx``: language models, the documented calls, and what is refused before any work."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

from quark.checkpoint import ExportOptions
from quark.checkpoint.content import content_of
from quark.checkpoint.export import exporter_of
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError, MissingPluginError, UnsupportedError
from quark.torch import LLMTemplate, ModelExporter, ModelQuantizer, export_onnx
from quark.torch.export import ExporterConfig, OnnxExporterConfig
from quark_devkit.small_models import batches, quantized, run_config, small_model
from quark_tiny_model import tiny_tokenizer

from .test_export import initializers, outputs, session

STATIC = QTensorConfig(dtype="int8", qscheme="per_tensor", is_dynamic=False, symmetric=True, observer_cls="PerTensorMinMaxObserver")


def test_a_language_model_computes_its_logits_in_onnxruntime(tmp_path: Path) -> None:
    """For any batch and length, with quantized weights, inputs, keys, values and probabilities."""
    config = LLMTemplate.get("llama").get_config(scheme="int8", kv_cache_scheme="fp8", attention_scheme="fp8")
    model: Any = ModelQuantizer(config).quantize_model(small_model(), batches())
    named = ExporterConfig(onnx_export_config=OnnxExporterConfig(input_names=["tokens"], opset_version=22))
    exporter = ModelExporter(named, tmp_path / "out")
    exporter.export_onnx_model(model, batches(1, 8)[0], output_names=["scores"])
    file = tmp_path / "out" / "quark_model.onnx"
    onnx.checker.check_model(file, full_check=True)
    run = session(file)
    assert [(place.name, place.shape[:2]) for place in (*run.get_inputs(), *run.get_outputs())] == [
        ("tokens", ["batch", "sequence"]),
        ("scores", ["batch", "sequence"]),
    ]
    stored = onnx.load(file)
    assert stored.opset_import[0].version == 22
    assert json.loads({p.key: p.value for p in stored.metadata_props}["quark.quantization_config"])["kv_cache_quant_config"]
    assert {node.op_type for node in stored.graph.node} >= {"QuantizeLinear", "DequantizeLinear"}
    for shape in ((3, 13), (1, 5)):
        ids = torch.randint(3, 96, shape, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected = model(ids).logits
        # A sum in another order may move a value over the edge of a step: few codes, and a fraction of what
        # quantization itself changes.
        assert float((outputs(file, ids)[0] - expected).norm() / expected.norm()) < 1e-2


class Digits(nn.Module):
    """A model that is not of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(4 * 36, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(images).relu().flatten(1))


def digits() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    images = torch.randn(4, 1, 8, 8)
    config = QConfig(QLayerConfig(weight=STATIC, input_tensors=STATIC), layer_type_quant_config={})
    return ModelQuantizer(config).quantize_model(Digits().eval(), [images]), images


def test_other_models_are_traced_with_the_inputs_that_are_given(tmp_path: Path) -> None:
    model, images = digits()
    export_onnx(model, tmp_path / "out", images)
    # As above: a value of the convolution that lies at the edge of a step may get the code beside it. Two
    # such values are allowed an image.
    head: Any = model.head
    step = float(head.input_quantizer.scale) * float(head.weight.abs().max())
    found = outputs(tmp_path / "out" / "quark_model.onnx", images)[0]
    torch.testing.assert_close(found, model(images).detach(), rtol=1e-5, atol=2 * step + 1e-5)
    assert initializers(tmp_path / "out" / "quark_model.onnx")["head.weight_quantizer.codes"].name == "INT8"


def test_without_inputs_they_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"Digits has no default example inputs.*input_args"):
        export_onnx(digits()[0], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_has_no_form_is_named_before_any_work(tmp_path: Path) -> None:
    dynamic = QTensorConfig(dtype="uint8", qscheme="per_tensor", is_dynamic=True, symmetric=False, observer_cls="PerTensorMinMaxObserver")
    model = ModelQuantizer(QConfig(QLayerConfig(weight=STATIC, input_tensors=dynamic))).quantize_model(small_model())
    with pytest.raises(UnsupportedError, match=r"uint8 has dynamic zero points.*layers\.\{0-1\}.*input_quantizer"):
        exporter_of("onnx").check(content_of(model), model, ExportOptions())  # type: ignore[attr-defined]


def test_mixtures_of_experts_are_refused() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    mixture = MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=1, num_local_experts=2)).eval()
    model = ModelQuantizer(LLMTemplate.get("mixtral").get_config("int4_wo_32")).quantize_model(mixture)
    with pytest.raises(UnsupportedError, match=r"experts of .*mlp\.experts"):
        exporter_of("onnx").check(content_of(model), model, ExportOptions())  # type: ignore[attr-defined]


def test_an_older_opset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="opset=17: earlier opsets than 21 lack 4-bit integers"):
        export_onnx(digits()[0], tmp_path / "out", opset_version=17)


def test_an_opset_that_the_installed_onnx_lacks_is_refused_before_any_work(tmp_path: Path) -> None:
    latest = onnx.defs.onnx_opset_version()
    with pytest.raises(ConfigError, match=f"opset={latest + 1}: the installed onnx package has opsets up to {latest}"):
        export_onnx(digits()[0], tmp_path / "out", opset_version=latest + 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_without_the_packages_the_message_has_the_command(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    model, images = digits()
    with pytest.raises(MissingPluginError, match=rf"{package}\. Install it with: pip install 'quark-exporters\[onnx\]'"):
        export_onnx(model, tmp_path / "out", images)


@pytest.mark.slow
def test_the_tokenizer_lies_beside_the_file(tmp_path: Path) -> None:
    exporter = exporter_of("onnx")
    exporter.export(content_of(quantized(run_config("fp8"))), tmp_path, ExportOptions(tokenizer=tiny_tokenizer()))
    assert {"quark_model.onnx", "tokenizer.json"} <= {path.name for path in tmp_path.iterdir()}
