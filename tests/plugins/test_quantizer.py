"""A quantizer with a scale structure of its own works with every algorithm, and is read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.errors import PluginError
from quark.numbers import QParams, TensorQuantizer, WeightGrid, quantizer_for
from quark.numbers.self_check import refuse_broken
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_tiny_model import calibration_batches, tiny_model

pytestmark = pytest.mark.usefixtures("third_party")
SCHEME = "third_rows_g32"
LAYER = "model.layers.0.mlp.up_proj"


def spec() -> QTensorConfig:
    return LLMTemplate.get("llama").get_config(scheme=SCHEME).global_quant_config.weight


def quantizer() -> TensorQuantizer:
    return quantizer_for(spec(), activation=False)


def weights() -> Tensor:
    return torch.randn(24, 128, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 1, 24)[:, None]


def quantized(algorithm: str | list[str] | None) -> Any:
    config = LLMTemplate.get("llama").get_config(scheme=SCHEME, algorithm=algorithm)
    return ModelQuantizer(config).quantize_model(tiny_model(blocks=1), calibration_batches(4, 64))


def test_a_spec_of_the_format_gets_the_quantizer() -> None:
    assert type(quantizer()).__name__ == "RowScaledQuantizer"
    assert type(quantizer_for(spec(), activation=True)).__name__ == "SingleLevelQuantizer"


def test_no_scale_of_it_spans_the_tensor_so_that_siblings_share_none() -> None:
    assert not quantizer().has_tensor_scale


def test_stacked_weights_have_the_scales_and_values_of_each_layers_quantizer() -> None:
    q, w = quantizer(), weights()
    wt = w.t().contiguous()
    grid = WeightGrid([q, q], (16, 8), wt)
    scales = grid.scales(wt)
    layers = grid.weights(grid.round_(wt.clone(), scales), scales)
    for (values, qparams, _), part in zip(layers, w.split((16, 8)), strict=True):
        expected, expected_qparams = q.round_to_nearest(part.contiguous())
        assert torch.equal(values, expected)
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(qparams.items(), expected_qparams.items(), strict=True))


@pytest.mark.parametrize("algorithm", [None, "gptq", "qronos", "awq", ["awq", "gptq"]], ids=str)
def test_a_model_is_exported_and_reads_back_to_the_bit(algorithm: str | list[str] | None, tmp_path: Path) -> None:
    model = quantized(algorithm)
    qparams = model.get_submodule(LAYER).weight_quantizer.qparams
    assert qparams.outer_scale.shape == (model.get_submodule(LAYER).weight.shape[0],)
    assert torch.equal(qparams.scale, qparams.scale.round().clamp(1, 63))
    export_safetensors(model, tmp_path / "out")
    loaded: Any = import_model_from_safetensors(None, tmp_path / "out", device="cpu")
    tokens = calibration_batches(1, 32)[0]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_an_outer_scale_for_parts_of_a_row_is_refused_before_any_work() -> None:
    sound = quantizer()
    half = QParams(torch.ones(16, 2), None, torch.ones(16, 2))

    class ByHalves(type(sound)):  # type: ignore[misc]
        def find_qparams(self, x: Tensor, shared: Any = None) -> QParams:
            return half

        def empty_qparams(self, shape: tuple[int, ...], device: str) -> QParams:
            return half

    refuse_broken(sound, activation=False)
    with pytest.raises(PluginError, match=r"third_row_scaled.* an outer scale of shape \[16, 2\] .* parts of a row cannot"):
        refuse_broken(ByHalves(*sound.levels), activation=False)


def test_gptq_comes_nearer_to_the_float_model_than_round_to_nearest() -> None:
    tokens = calibration_batches(6, 64)[-1]
    with torch.no_grad():
        expected = tiny_model(blocks=1)(tokens).logits
        nearest, calibrated = (float((quantized(a)(tokens).logits - expected).norm()) for a in (None, "gptq"))
    assert calibrated < nearest
