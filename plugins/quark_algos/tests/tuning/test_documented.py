"""AMD Quark's names of block tuning equal tuning and AutoRound."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quark.errors import ConfigError
from quark.experimental.torch.autoround import AutoRoundProcessor  # type: ignore[import-not-found]
from quark.torch import ModelQuantizer
from quark.torch.algorithm.api import blockwise_tuning_algo  # type: ignore[import-not-found]
from quark.torch.algorithm.config import BlockwiseJointTuningConfig, BlockwiseTuningConfig  # type: ignore[import-not-found]
from quark.torch.quantization.config.config import AutoRoundConfig
from quark_tiny_model import calibration_batches, tiny_model, tiny_template

DATA = calibration_batches(4, 32)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def by_name(algorithm: str, **options: object) -> dict[str, torch.Tensor]:
    config = tiny_template().get_config("int4_wo_64", algorithm, algorithm_options={algorithm: options})
    return weights(ModelQuantizer(config).quantize_model(tiny_model(), DATA))


def rounded() -> nn.Module:
    return ModelQuantizer(tiny_template().get_config("int4_wo_64")).quantize_model(tiny_model())


def test_a_quantized_model_is_tuned_in_place(caplog: pytest.LogCaptureFixture) -> None:
    float_model, model = tiny_model(), rounded()
    before = weights(float_model)
    settings = BlockwiseTuningConfig(epochs=1, weight_lr=1e-4, trainable_modules=["q_proj"])
    assert "BlockwiseTuningConfig ignores weight_lr, trainable_modules" in caplog.text
    assert blockwise_tuning_algo(float_model, model, settings, None, DATA) is model
    expected = by_name("tuning", epochs=1)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(model).items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(float_model).items())
    assert [algorithm.name for algorithm in model.quant_config.algo_config] == ["tuning"]  # type: ignore[union-attr]


def test_autoround_by_its_processor() -> None:
    model = rounded()
    settings = AutoRoundConfig(iters=2, batch_size=1, inside_layer_modules=["self_attn.q_proj"], model_decoder_layers="model.layers")
    AutoRoundProcessor(tiny_model(), model, settings, DATA).apply()
    expected = by_name("autoround", iters=2, batch_size=1)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(model).items())


def test_without_settings_nothing_is_done_and_a_float_model_is_refused() -> None:
    model = tiny_model()
    assert blockwise_tuning_algo(model, model, None, None, None) is model
    with pytest.raises(ConfigError, match="Quantize this LlamaForCausalLM with ModelQuantizer first"):
        blockwise_tuning_algo(tiny_model(), model, BlockwiseJointTuningConfig(), None, DATA)
