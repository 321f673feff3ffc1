"""Laws of every scheme beside the conformance suite: the error of a normal weight, and options that reach its specs."""

import pytest
import torch
from torch import Tensor

import quark
from quark.config.layer import QLayerConfig
from quark.errors import ConfigError
from quark.numbers import TensorQuantizer, quantizer_for
from quark.torch import LLMTemplate

SCHEMES = quark.schemes().names()


def layer(scheme: str) -> QLayerConfig:
    found: QLayerConfig = quark.schemes().load_config(scheme)()
    return found


def weight_quantizer(scheme: str) -> TensorQuantizer:
    return quantizer_for(layer(scheme).weight, activation=False)  # type: ignore[arg-type]


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_error_of_a_normal_weight_is_what_its_bits_allow(scheme: str) -> None:
    """Relative error on normal weights, against the bounds of uniform or logarithmic steps of that many bits."""
    x = data(64, 512)
    error = float((weight_quantizer(scheme).fake_quantize(x) - x).norm() / x.norm())
    bits = {"mx6": 5, "mx9": 8, "bfp16": 8, "int8": 8, "fp8": 8, "ptpc_fp8": 8}.get(scheme, 6 if scheme.startswith("mxfp6") else 4)
    bits = 8 if scheme.startswith(("int8_", "fp8_")) else bits
    bits = {"int2": 2, "int3": 3, "vq2": 2, "vq3": 3}.get(scheme.partition("_")[0], bits)
    assert error < {2: 0.8, 3: 0.4, 4: 0.2, 5: 0.04, 6: 0.06, 8: 0.03}[bits]  # 2, 3 bits: twice the error of 4 bits for each bit less
    assert error > {2: 0.2, 3: 0.1, 4: 0.05, 5: 0.01, 6: 0.01, 8: 0.0005}[bits], "too good to be true"


def test_options_of_a_scheme_reach_its_specs_and_unknown_ones_are_refused() -> None:
    template = LLMTemplate.get("llama")
    assert template.get_config("mx6", scheme_options={"block_size": 32}).global_quant_config.weight.group_size == 32
    assert template.get_config("mx6").global_quant_config.weight.group_size == 16
    with pytest.raises(ConfigError, match=r"'mx6' has no option 'group_size'\. Did you mean 'block_size'\? Its options: block_size=16"):
        template.get_config("mx6", scheme_options={"group_size": 32})
    with pytest.raises(ConfigError, match=r"'int8' has no option 'block_size'\. Its options: none"):
        template.get_config("int8", scheme_options={"block_size": 32})
