"""What holds for every scheme, whatever it is made of: shapes, dtypes, memory layouts, values that are hard."""

import pytest
import torch
from torch import Tensor

import quark
from quark.config.layer import QLayerConfig, levels
from quark.errors import ConfigError
from quark.modules import QuantizerModule
from quark.quantizers import TensorQuantizer, quantizer_for
from quark.torch import LLMTemplate

SCHEMES = quark.schemes().names()
WITH_INPUT = [s for s in SCHEMES if quark.schemes().load_config(s)().input_tensors is not None]


def layer(scheme: str) -> QLayerConfig:
    found: QLayerConfig = quark.schemes().load_config(scheme)()
    return found


def weight_quantizer(scheme: str) -> TensorQuantizer:
    return quantizer_for(layer(scheme).weight, activation=False)  # type: ignore[arg-type]


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def input_module(scheme: str, x: Tensor) -> QuantizerModule:
    """An input quantizer, calibrated on ``x`` where it is static."""
    module = QuantizerModule(layer(scheme).input_tensors, activation=True)  # type: ignore[arg-type]
    if not module.quantizer.is_dynamic:
        observer = module.quantizer.observer()
        observer.observe(x)
        module.set_qparams(module.quantizer.qparams_from(observer))
    return module


@pytest.mark.parametrize("scheme", SCHEMES)
def test_simulation_codes_and_bytes_say_the_same(scheme: str) -> None:
    quantizer, x = weight_quantizer(scheme), data(16, 256)
    values, qparams = quantizer.round_to_nearest(x)
    codes = quantizer.quantize(x, qparams)
    assert torch.equal(quantizer.dequantize(codes, qparams), values)
    assert torch.equal(quantizer.codes_of(values, qparams), codes)
    for order in ("order", "reorder"):
        again, read = quantizer.unpack(quantizer.pack(codes, qparams, order=order), (16, 256), order=order)
        assert torch.equal(quantizer.dequantize(again, read), values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", WITH_INPUT)
def test_activations_of_any_rank_and_dtype_quantize_on_the_cpu(scheme: str, dtype: torch.dtype) -> None:
    x = data(2, 3, 4, 256).to(dtype)
    module = input_module(scheme, x)
    whole = module(x)
    assert (whole.shape, whole.dtype) == (x.shape, dtype)
    assert whole.isfinite().all()
    assert (whole - x).float().norm() / x.float().norm() < 0.2
    for part in (x[0], x[0, 0], x[:, :, 0]):
        assert module(part).shape == part.shape
    assert torch.equal(module(x.transpose(0, 1)), whole.transpose(0, 1)), "memory layout does not matter"
    assert module(x[:0]).shape == (0, 3, 4, 256)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zeros_stay_zeros_and_empty_tensors_stay_empty(scheme: str) -> None:
    quantizer = weight_quantizer(scheme)
    assert not quantizer.fake_quantize(torch.zeros(8, 256)).any()
    values, qparams = quantizer.round_to_nearest(torch.zeros(8, 256))
    assert not quantizer.dequantize(quantizer.codes_of(values, qparams), qparams).any()
    assert quantizer.fake_quantize(torch.zeros(0, 256)).shape == (0, 256)
    assert all(t.isfinite().all() for _, t in qparams.items())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_nan_and_inf_do_not_vanish(scheme: str, bad: float) -> None:
    x = data(8, 256)
    x[3, 7] = bad
    assert not weight_quantizer(scheme).fake_quantize(x).isfinite().all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_tensor_of_tiny_values_gives_finite_values_of_its_size(scheme: str) -> None:
    x = data(8, 256) * 1e-30
    y = weight_quantizer(scheme).fake_quantize(x)
    assert y.isfinite().all()
    assert y.abs().max() <= 1e-6, "a floor of scales may lift them no further"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_error_of_a_normal_weight_is_what_its_bits_allow(scheme: str) -> None:
    """Relative error on normal weights, against what uniform or logarithmic steps of that many bits allow."""
    x = data(64, 512)
    error = float((weight_quantizer(scheme).fake_quantize(x) - x).norm() / x.norm())
    bits = {"mx6": 5, "mx9": 8, "bfp16": 8, "int8": 8, "fp8": 8, "ptpc_fp8": 8}.get(scheme, 6 if scheme.startswith("mxfp6") else 4)
    assert error < {4: 0.2, 5: 0.04, 6: 0.06, 8: 0.03}[bits]
    assert error > {4: 0.05, 5: 0.01, 6: 0.01, 8: 0.0005}[bits], "too good to be true"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_groups_that_do_not_divide_are_refused_with_the_numbers(scheme: str) -> None:
    quantizer = weight_quantizer(scheme)
    problem = quantizer.shape_error((16, 250))
    sizes = [s.group_size for s in levels(layer(scheme).weight) if s.group_size]
    assert (problem is not None) == bool(sizes)
    if sizes:
        assert "250" in str(problem)
        assert str(sizes[0]) in str(problem)


def test_options_of_a_scheme_reach_its_specs_and_unknown_ones_are_refused() -> None:
    template = LLMTemplate.get("llama")
    assert template.get_config("mx6", scheme_options={"block_size": 32}).global_quant_config.weight.group_size == 32
    assert template.get_config("mx6").global_quant_config.weight.group_size == 16
    with pytest.raises(ConfigError, match=r"'mx6' has no option 'group_size'\. Did you mean 'block_size'\? Its options: block_size=16"):
        template.get_config("mx6", scheme_options={"group_size": 32})
    with pytest.raises(ConfigError, match=r"'int8' has no option 'block_size'\. Its options: none"):
        template.get_config("int8", scheme_options={"block_size": 32})
