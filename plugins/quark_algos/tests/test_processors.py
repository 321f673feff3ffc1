"""The documented processor classes equal a configuration that names the algorithm."""

from __future__ import annotations

import attrs
import pytest
import torch

import quark_tiny_model as tiny
from quark.errors import ConfigError
from quark.torch import LLMTemplate, ModelQuantizer
from quark_algos import processors
from quark_algos.gptq.config import GPTQConfig

DATA = [torch.arange(3, 163)[None]]


def test_applying_a_processor_equals_configuring_its_algorithm() -> None:
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64")
    by_hand, configured = tiny.tiny_model(), tiny.tiny_model()
    by_hand.quant_config = config
    processors.GptqProcessor(by_hand, GPTQConfig(), DATA).apply()
    ModelQuantizer(attrs.evolve(config, algo_config=[GPTQConfig()])).quantize_model(configured, DATA)
    assert all(torch.equal(a, b) for a, b in zip(by_hand.state_dict().values(), configured.state_dict().values(), strict=True))


def test_a_processor_without_a_configuration_of_the_model_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"Set model\.quant_config"):
        processors.QronosProcessor(tiny.tiny_model(), GPTQConfig(), DATA)
