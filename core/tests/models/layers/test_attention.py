"""This project's attention: the formula, the quantizers' inputs, and models that can switch to it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from quark.errors import CheckpointError, UnsupportedError
from quark.models.hf.attention_switch import refuse_unswitchable
from quark.models.layers import QuantizerModule
from quark.models.layers.attention import eager_attention, sdpa_attention
from quark.models.layers.coded_layer import packed_scales
from quark.models.layers.packed_layers import PackedQuantizer, PackedScales
from quark.numbers import QParams, quantizer_for
from quark.plugins import documented_object

FP8 = documented_object("FP8E4M3PerTensorSpec")(observer_method="min_max", is_dynamic=False).to_quantization_spec()


def module(**quantizers: Any) -> nn.Module:
    made = nn.Module().eval()
    made.num_key_value_groups = 2  # type: ignore[assignment]
    for name, quantizer in quantizers.items():
        setattr(made, name, quantizer)
    return made


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four heads over two key heads, six tokens; a causal mask."""
    torch.manual_seed(0)
    mask = torch.full((6, 6), torch.finfo(dtype).min, dtype=dtype).triu(1)[None, None]
    return torch.randn(2, 4, 6, 8).to(dtype), torch.randn(2, 2, 6, 8).to(dtype), torch.randn(2, 2, 6, 8).to(dtype), mask


def test_heads_of_a_group_share_a_key_and_logits_are_scaled_by_the_root_of_the_width() -> None:
    query, key, value, mask = tensors()
    found, probabilities = eager_attention(module(), query, key, value, mask)
    wanted = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(found, wanted.transpose(1, 2))
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(2, 4, 6))


def test_a_softcap_bounds_the_logits() -> None:
    query, key, value, _ = tensors()
    _, probabilities = eager_attention(module(), query * 1000, key, value, None, scaling=1.0, softcap=1.0)
    ratio = probabilities.amax(-1) / probabilities.amin(-1)
    torch.testing.assert_close(ratio.amax(), torch.tensor(2.0).exp())


def test_what_is_masked_stays_so_under_a_softcap() -> None:
    query, key, value, mask = tensors()
    _, probabilities = eager_attention(module(), query, key, value, mask, softcap=1.0)
    assert (probabilities[..., mask[0, 0] < 0] == 0).all()
    assert (probabilities[..., mask[0, 0] == 0] > 0).all()


def test_a_position_bias_is_added_like_a_mask() -> None:
    query, key, value, mask = tensors()
    biased, _ = eager_attention(module(), query, key, value, None, position_bias=mask)
    assert torch.equal(biased, eager_attention(module(), query, key, value, mask)[0])


def test_a_sink_takes_its_share_of_the_probability_and_gives_no_value() -> None:
    query, key, value, mask = tensors()
    sinks = torch.tensor([0.0, 1.0, -2.0, 3.0])
    _, without = eager_attention(module(), query, key, value, mask, scaling=0.1)
    _, found = eager_attention(module(), query, key, value, mask, scaling=0.1, s_aux=sinks)
    logits = torch.matmul(query, key.repeat_interleave(2, 1).transpose(2, 3)) * 0.1 + mask
    share = torch.sigmoid(logits.logsumexp(-1) - sinks[None, :, None])
    torch.testing.assert_close(found, without * share[..., None])


def test_probabilities_are_quantized_in_float32_and_used_as_they_come_back() -> None:
    query, key, value, mask = tensors(torch.bfloat16)
    seen: list[torch.dtype] = []

    def first_token_only(x: Tensor) -> Tensor:
        seen.append(x.dtype)
        return functional.one_hot(torch.zeros(x.shape[:-1], dtype=torch.long), x.shape[-1]).to(x.dtype)

    found, probabilities = eager_attention(module(prob_output_quantizer=first_token_only), query, key, value, mask)
    assert seen == [torch.float32]
    assert probabilities.dtype == torch.bfloat16
    assert torch.equal(found, value[:, :, :1].repeat_interleave(2, 1).expand(2, 4, 6, 8).transpose(1, 2))


def test_probabilities_take_only_values_of_their_format() -> None:
    quantizer = QuantizerModule(FP8, activation=True)
    quantizer.set_qparams(QParams(torch.tensor(1 / 448)))
    _, probabilities = eager_attention(module(prob_output_quantizer=quantizer), *tensors())
    codes = probabilities * 448
    torch.testing.assert_close(codes.to(torch.float8_e4m3fn).float(), codes, rtol=2**-22, atol=0)  # one rounding each way
    assert not torch.equal(probabilities, eager_attention(module(), *tensors())[1])


@pytest.mark.parametrize("attention", [eager_attention, sdpa_attention])
def test_keys_are_quantized_once_for_each_key_head(attention: Any) -> None:
    query, key, value, mask = tensors()
    seen: list[Tensor] = []

    def double(x: Tensor) -> Tensor:
        seen.append(x)
        return x * 2

    found, _ = attention(module(key_quantizer=double), query, key, value, mask, scaling=1.0)
    assert torch.equal(found, attention(module(), query, key * 2, value, mask, scaling=1.0)[0])
    assert len(seen) == 1
    assert seen[0] is key


def test_probabilities_are_dropped_in_training_only() -> None:
    inputs = tensors()
    assert torch.equal(eager_attention(module(), *inputs, dropout=1.0)[0], eager_attention(module(), *inputs)[0])
    assert not eager_attention(module().train(), *inputs, dropout=1.0)[0].any()


class Exchangeable(nn.Module):
    """A model with the methods of transformers' models by which attention is switched."""

    def __init__(self, implementation: str, can: bool = True) -> None:
        super().__init__()
        self.attn = nn.Identity()
        self.config = SimpleNamespace(_attn_implementation=implementation)
        type(self)._can_set_attn_implementation = classmethod(lambda _: can)  # type: ignore[attr-defined]

    def set_attn_implementation(self, _: str) -> None:
        raise AssertionError("nothing is switched by a check")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.Sequential(nn.Identity()), "attention of a Sequential cannot be quantized: only the attention of transformers models"),
        (lambda: Exchangeable("eager", can=False), "does not use transformers' attention interface"),
        (lambda: Exchangeable("flash_attention_2"), "'attn' uses the attention implementation 'flash_attention_2'.*'eager' or 'sdpa'"),
    ],
)
def test_models_whose_attention_cannot_be_exchanged_are_refused_with_the_cure(model: Any, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        refuse_unswitchable(model(), ["attn"])


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "quark_eager", "quark_sdpa"])
def test_eager_and_fused_attention_can_be_exchanged(implementation: str) -> None:
    refuse_unswitchable(Exchangeable(implementation), ["attn"])


def test_a_packed_quantizer_becomes_the_quantizer_of_its_scales() -> None:
    packed = PackedQuantizer(FP8, "reorder")
    assert {n: t.is_meta for n, t in packed.state_dict().items()} == {"scale": True}
    packed._buffers["scale"] = torch.tensor(0.5)
    wanted = QuantizerModule(FP8, activation=True)
    wanted.set_qparams(QParams(torch.tensor(0.5)))
    x = torch.randn(3, 5)
    assert torch.equal(packed.unpack()(x), wanted(x))


@pytest.mark.parametrize("scale", [0.0, 2.0, float("nan"), float("inf"), -1.0])
def test_what_a_loader_left_in_memory_is_no_scale(scale: float) -> None:
    packed = PackedQuantizer(FP8, "reorder", largest=1.0)
    packed._buffers["scale"] = torch.tensor(scale)
    with pytest.raises(CheckpointError, match=r"a scale inside attention is .*import_model_from_safetensors"):
        packed.unpack()


def test_a_packed_quantizer_may_find_its_scales_elsewhere() -> None:
    stored = PackedScales(packed_scales(quantizer_for(FP8, activation=True), (1,), "reorder"), FP8)
    packed = PackedQuantizer(FP8, "reorder", stored)
    assert list(packed.state_dict()) == [], "a checkpoint's loader sees the scales in one place"
    stored._buffers["scale"] = torch.tensor(0.25)
    assert float(packed.unpack().scale) == 0.25  # type: ignore[arg-type]


@pytest.mark.parametrize("attention", [eager_attention, sdpa_attention])
def test_queries_and_keys_in_another_basis_give_the_same_and_keys_are_quantized_in_it(attention: Any) -> None:
    query, key, value, mask = tensors(torch.float64)
    basis, _ = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    seen = []

    def quantizer(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    plain, _ = attention(module(), query, key, value, mask)
    found, _ = attention(module(head_basis=lambda x: x @ basis, key_quantizer=quantizer), query, key, value, mask)
    assert torch.allclose(found, plain, rtol=0, atol=1e-6)  # the softmax is in float32
    assert torch.allclose(seen[0], key @ basis)
    assert not torch.allclose(attention(module(key_quantizer=lambda x: x @ basis), query, key, value, mask)[0], plain, atol=1e-3)
