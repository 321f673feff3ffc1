"""Calibration shows a rounding the inputs that each layer gets in the finished model.

This holds with quantized activations, experts and skipped layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from quark.algorithms import Metrics, RoundingTask, RoundToNearest
from quark.calibration.batches import calls
from quark.calibration.report import CalibrationReport
from quark.config.architecture import Architecture
from quark.config.model import QConfig
from quark.models.hf.attention_switch import switch_attention
from quark.models.layers import QuantizedLayer, QuantizerModule
from quark.models.plan.family import architecture_of
from quark.models.plan.mixtures import separate_experts
from quark.models.plan.quant_plan import make_plan
from quark.runs.quantize_block import quantize_blocks
from quark.runs.sink import InPlaceSink
from quark.torch import LLMTemplate
from quark_tiny_model import tiny_model

from ..hand_made_runs import hand_made_run
from .inputs import Inputs

IDS = [torch.arange(3, 19)[None], torch.arange(30, 40)[None], torch.arange(5, 17).reshape(2, 6)]
CACHE = {"kv_cache_scheme": "fp8"}
ATTENTION = {"attention_scheme": "fp8"}
BEFORE = {"kv_cache_post_rope": False, "attention_post_rope": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "cache as projected": CACHE | BEFORE,
    "cache as cached": CACHE | {"kv_cache_post_rope": True},
    "attention, queries as projected": ATTENTION | BEFORE,
    "attention": ATTENTION,
    "cache and attention": CACHE | ATTENTION,
}


class FloatInputs(Inputs):
    wants_float = True


class Spy(RoundToNearest):
    """Rounds to nearest, and keeps the inputs and input scales at that time."""

    def __init__(self, *endings: str, kind: type[Inputs] = Inputs) -> None:
        self.needs = (kind,)
        self.kind = kind
        self.endings = endings or ("",)
        self.inputs: dict[str, list[Tensor]] = {}
        self.scales: dict[str, Tensor | None] = {}

    def applies_to(self, name: str) -> bool:
        return name.endswith(self.endings)

    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        super().round(task)
        for name, layer in task.layers.items():
            self.inputs[name] = task.statistic(self.kind).seen
            self.scales[name] = None if layer.input_quantizer is None else scale_of(layer.input_quantizer)
        return {}


def scale_of(quantizer: QuantizerModule) -> Tensor | None:
    """Return the scale that the observed range decides; of a two-level scale, the outer one."""
    found = quantizer.outer_scale if quantizer.outer_scale is not None else quantizer.scale
    return None if found is None else found.clone()


def quantized(
    model: nn.Module, config: QConfig, rounding: Any, *, two_passes: bool = False, architecture: Architecture | None = None
) -> CalibrationReport:
    separate_experts(model, config)
    plan = make_plan(model, config, architecture or architecture_of(model))
    if plan.attentions:
        switch_attention(model, [a.name for a in plan.attentions], eager=config.softmax_quant_spec is not None)
    return quantize_blocks(hand_made_run(model, plan, calls(IDS), rounding, two_passes=two_passes), InPlaceSink(model))


def config(scheme: str = "int4_wo_32", family: str = "llama", **options: Any) -> QConfig:
    return LLMTemplate.get(family).get_config(scheme=scheme, **options)


def small(family: type = Qwen3Config, **sizes: Any) -> nn.Module:
    torch.manual_seed(0)
    common = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model: nn.Module = AutoModelForCausalLM.from_config(family(**{**common, **heads, **sizes}), dtype=torch.float32)
    return model.eval()


def mixture() -> nn.Module:
    return small(Qwen3MoeConfig, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)


@contextmanager
def recorded(model: nn.Module, names: list[str]) -> Iterator[dict[str, list[Tensor]]]:
    """Yield the inputs of layers while the body runs, after the input quantizers, token by token."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}

    def see(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(layer: Any, args: tuple[Tensor, ...]) -> None:
            x = args[0] if layer.input_quantizer is None else layer.input_quantizer(args[0])
            found[name].append(x.reshape(-1, x.shape[-1]))

        return hook

    hooks = [model.get_submodule(name).register_forward_pre_hook(see(name)) for name in names]
    yield found
    for hook in hooks:
        hook.remove()


def different(model: nn.Module, shown: Mapping[str, list[Tensor]]) -> list[str]:
    """Return the layers whose inputs in the finished model have other bits than the inputs in calibration."""
    with torch.no_grad(), recorded(model, list(shown)) as found:
        for ids in IDS:
            model(ids)
    return [name for name, xs in found.items() if not torch.equal(torch.cat(xs), torch.cat(shown[name]))]


@pytest.mark.parametrize("scheme", ["int4_wo_32", "fp8", "mxfp4"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_layers_are_rounded_for_what_the_finished_model_gives_them(scheme: str, options: dict[str, Any]) -> None:
    model, spy = tiny_model(), Spy()
    quantized(model, config(scheme, **options), spy)
    assert len(spy.inputs) == 7 * len(model.model.layers)
    assert different(model, spy.inputs) == []


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_with_a_float_stream_they_are_too_and_that_stays_float(options: dict[str, Any]) -> None:
    model, spy = tiny_model(), Spy(kind=FloatInputs)
    quantized(model, config(**options), spy)
    assert different(model, spy.inputs) == []


@pytest.mark.parametrize("scheme", ["int4_wo_32", "fp8"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_in_two_passes_each_block_gets_what_the_finished_blocks_before_it_give(scheme: str, options: dict[str, Any]) -> None:
    """Within a block, the first pass uses float weights.

    The inputs of the block's first layers do not depend on these weights.
    """
    model, spy = tiny_model(), Spy()
    quantized(model, config(scheme, **options), spy, two_passes=True)
    first = {n: [model.get_submodule(n).input_quantizer(x) if scheme == "fp8" else x for x in xs] for n, xs in spy.inputs.items()}  # type: ignore[operator]
    first = {n: xs for n, xs in first.items() if n.endswith(("q_proj", "k_proj", "v_proj"))}
    assert len(first) == 3 * len(model.model.layers)
    assert different(model, first) == []


@pytest.mark.parametrize("two_passes", [False, True], ids=["one pass", "two passes"])
@pytest.mark.parametrize("scheme", ["int4_wo_32", "fp8"])
def test_errors_of_layers_that_the_rounding_does_not_take_reach_those_behind_them(scheme: str, two_passes: bool) -> None:
    model, spy = tiny_model(), Spy("q_proj", *([] if two_passes else ["down_proj"]))
    report = quantized(model, config(scheme, **CACHE), spy, two_passes=two_passes)
    shown = spy.inputs
    if two_passes and scheme == "fp8":
        shown = {n: [model.get_submodule(n).input_quantizer(x) for x in xs] for n, xs in shown.items()}  # type: ignore[operator]
    assert different(model, shown) == []
    assert set(report.layers) == set(shown)
    assert report.unreached == [], "tokens reach the others; the rounding does not take them"


def test_a_family_that_is_not_known_is_shown_the_same() -> None:
    facts = Architecture(model_type="llama", decoder_blocks="model.layers")
    for options in (CACHE | BEFORE, CACHE):
        model, spy = tiny_model(), Spy()
        quantized(model, config(**options), spy, architecture=facts)
        assert different(model, spy.inputs) == []
        for i in range(len(model.model.layers)):
            attention = model.get_submodule(f"model.layers.{i}.self_attn")
            scales = [
                getattr(attention, f"{word}_quantizer", None) or attention.get_submodule(f"{word[0]}_proj").output_quantizer
                for word in ("key", "value")
            ]
            assert torch.equal(scales[0].scale, scales[1].scale), "keys and values share the larger"


@pytest.mark.parametrize("scheme", ["int4_wo_32", "fp8", "nvfp4"])
def test_layers_that_were_wrongly_said_to_share_an_input_are_finished_for_their_own(scheme: str) -> None:
    import attrs

    model, spy = tiny_model(), Spy()
    facts = architecture_of(model)
    assert facts is not None
    wrong = attrs.evolve(facts, attention_inputs=(*facts.attention_inputs, "self_attn.o_proj"))
    quantized(model, config(scheme, **CACHE), spy, architecture=wrong)
    assert different(model, spy.inputs) == []


@pytest.mark.parametrize("all_experts", [False, True], ids=["routed", "all experts"])
@pytest.mark.parametrize("kind", [Inputs, FloatInputs])
def test_experts_are_rounded_for_the_pooled_scale_that_they_are_shipped_with(kind: type[Inputs], all_experts: bool) -> None:
    import attrs

    model, spy = mixture(), Spy(kind=kind)
    asked = config("nvfp4", "qwen3_moe")
    assert asked.sync_moe_expert_input_amax
    report = quantized(model, attrs.evolve(asked, calibrate_all_experts=all_experts), spy)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLayer) and n in spy.inputs}
    experts = [n for n in layers if ".experts." in n]
    assert len(experts) == 2 * 4 * 3
    changed = [n for n, m in layers.items() if not torch.equal(spy.scales[n], scale_of(m.input_quantizer))]  # type: ignore[arg-type]
    assert changed == []
    if not all_experts:
        assert different(model, spy.inputs) == []
        tokens = sum(ids.numel() for ids in IDS)
        for i in range(2):
            counted = [report.tokens[n] for n in experts if n.startswith(f"model.layers.{i}.") and n.endswith("gate_proj")]
            assert sum(counted) == 2 * tokens, "rehearsals do not count"


def test_the_pooled_scale_is_that_of_all_that_experts_get_from_the_finished_model() -> None:
    model, spy = mixture(), Spy()
    quantized(model, config("nvfp4", "qwen3_moe"), spy)
    for projection in ("gate_proj", "down_proj"):
        names = [f"model.layers.1.mlp.experts.{i}.{projection}" for i in range(4)]
        quantizers = [model.get_submodule(n).input_quantizer for n in names]
        seen = quantizers[0].quantizer.observer()
        hooks = [model.get_submodule(n).register_forward_pre_hook(lambda m, args, seen=seen: seen.observe(args[0])) for n in names]
        with torch.no_grad():
            for ids in IDS:
                model(ids)
        for hook in hooks:
            hook.remove()
        expected = quantizers[0].quantizer.qparams_from(seen)
        for quantizer in quantizers:
            assert all(torch.equal(a, b) for (_, a), (_, b) in zip(quantizer.qparams.items(), expected.items(), strict=True))


@pytest.mark.parametrize("options", [CACHE, CACHE | ATTENTION], ids=["cache", "cache and attention"])
def test_scales_of_what_is_cached_are_those_of_what_the_finished_model_caches(options: dict[str, Any]) -> None:
    """The cache stores keys after their norm, so the outputs of the projection have another range."""
    model = small()
    for block in model.model.layers:
        block.self_attn.k_norm.weight.data *= 40
        block.self_attn.q_norm.weight.data /= 40
    made = config("int4_wo_32", "qwen3", **options)
    made.separate_kv_scales = True
    quantized(model, made, Spy())
    with torch.no_grad():
        caches = [model(ids, use_cache=True).past_key_values for ids in IDS]
    for i, block in enumerate(model.model.layers):
        for states, quantizer in (("keys", block.self_attn.key_quantizer), ("values", block.self_attn.value_quantizer)):
            largest = max(float(getattr(cache.layers[i], states).abs().max()) for cache in caches)
            assert float(quantizer.scale) == pytest.approx(largest / 448, rel=2**-20)
