"""torch.compile traces a quantized model whole, and the compiled model computes the same, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quark.models.layers.quantizer_module import QuantizerModule
from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_tiny_model import calibration_batches, tiny_model, tiny_template

pytestmark = pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")

IDS = torch.arange(3, 20)[None]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(IDS).logits
    return result


def quantized(scheme: str, **settings: Any) -> nn.Module:
    return ModelQuantizer(tiny_template().get_config(scheme, **settings)).quantize_model(tiny_model(), calibration_batches(2, 32))


@pytest.mark.parametrize(
    ("scheme", "settings"),
    [
        pytest.param("fp8", {"kv_cache_scheme": "fp8", "attention_scheme": "fp8"}, id="static inputs, cache and attention"),
        pytest.param("mxfp4", {"algorithm": "rotation"}, id="dynamic inputs, rotation", marks=pytest.mark.thorough),
        pytest.param("nvfp4", {}, id="two-level scales", marks=pytest.mark.thorough),
        pytest.param("int4_wo_64", {"algorithm": "lqer"}, id="a branch", marks=pytest.mark.thorough),
    ],
)
def test_a_quantized_model_is_traced_whole_and_computes_the_same(scheme: str, settings: dict[str, Any]) -> None:
    model = quantized(scheme, **settings)
    assert torch.equal(logits(torch.compile(model, backend="eager", fullgraph=True)), logits(model))


@pytest.mark.thorough
@pytest.mark.parametrize("packed", [False, True])
def test_a_checkpoint_computes_the_same_compiled(packed: bool, tmp_path: Path) -> None:
    export_safetensors(quantized("fp8"), tmp_path / "out")
    model = import_model_from_safetensors(None, tmp_path / "out", packed=packed)
    expected = logits(model)
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        assert torch.equal(logits(compiled), expected)


def test_gradients_pass_straight_through_a_compiled_quantizer() -> None:
    spec: Any = tiny_template().get_config("ptpc_fp8").global_quant_config.input_tensors
    quantizer, weight = QuantizerModule(spec, activation=True), torch.randn(8)
    compiled = torch.compile(quantizer, backend="aot_eager", fullgraph=True)
    gradients = []
    for module in (quantizer, compiled):
        x = torch.linspace(-2, 2, 24).view(3, 8).requires_grad_()
        (module(x) * weight).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], weight.expand(3, 8))
