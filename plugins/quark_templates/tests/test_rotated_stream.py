"""Facts that a rotation of the residual stream, R1, needs of a family: who writes to it and who reads it.

On a tiny model of the family.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import pytest
import torch
from torch import Tensor, nn
from transformers import WhisperConfig, WhisperForCausalLM

from quark.config.architecture import Architecture
from quark.config.templates.algorithms import refusal
from quark.models.plan.family import architecture_of
from quark.torch.quantization.config.algo_configs import get_algo_config
from quark_algos.rotation.config import RotationConfig
from quark_algos.rotation.fold import fold_r2

from .whole_models import ALL, IDS, batch_for, blocks_of, distance, facts_of, heads_of, logits, named_by, weights_of, whole_model

WIDTH = 32
TOLERANCE = 1e-9
OTHERWISE_READ = {"deepseek_v4", "deepseek_vl_v2", "glm5_next", "kimi_k3", "minimax_m3_vl", "qwen4_exp", "qwen4_exp_text"}
"""Several streams, or mixtures of what earlier blocks gave; DeepSeek-OCR, whose images write past all layers;
MiniMax-M3 with indexers.
"""
NORMED_OUTPUTS = {
    *("bloom", "exaone4", "gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_unified", "glm4", "glm4v"),
    *("grok-1", "muse_glimmer", "olmo2", "olmo3"),
}
"""Those with weights in norms that write to the stream."""
CANNOT = OTHERWISE_READ | NORMED_OUTPUTS
NO_VALUES = {"deepseek_v4", "gemma4", "gemma4_unified", "kimi_k3", "muse_glimmer"}
"""Of these, values cannot be rotated either: keys are values, a norm lies behind them, or a gate multiplies
their channels.
"""


GATED_BY_QUERIES = {"qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp", "qwen4_exp_text"}
"""Half of what their query projection puts out are gates of single channels, which the rotation of values
sees in its shape.
"""


class Plain(nn.Module):
    """RMSNorm without a weight, with the bias that it keeps.

    A LayerNorm is one, where the stream has mean zero.
    """

    def __init__(self, eps: float, bias: Tensor) -> None:
        super().__init__()
        self.eps, self.bias = eps, bias

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) + self.bias


def eps_of(norm: nn.Module) -> float:
    """Return the epsilon that a norm adds to the mean square.

    Torch's RMSNorm takes the least that matters unless told, OLMo's LayerNorm writes 1e-5.
    """
    if isinstance(norm, nn.RMSNorm) and norm.eps is None:
        return torch.finfo(torch.float64).eps
    return next((float(getattr(norm, name)) for name in ("eps", "variance_epsilon") if hasattr(norm, name)), 1e-5)


def plain(norm: nn.Module, facts: Architecture, q: Tensor) -> tuple[Plain, Tensor]:
    """Return the norm in the rotated stream, and the weight that goes into its readers."""
    stored = norm.weight if facts.norm_has_weight else torch.ones(len(q), dtype=q.dtype)
    assert isinstance(stored, Tensor)
    weight = stored + (1.0 if facts.norm_has_unit_offset else 0.0)
    bias = getattr(norm, "bias", None)
    return Plain(eps_of(norm), torch.zeros_like(weight) if bias is None else (bias / weight) @ q), weight


def write(module: nn.Module, by: Tensor) -> None:
    """Multiply the output of a module by a matrix."""
    weight = module.weight if isinstance(module, nn.Embedding) else weights_of(module).t()
    weight.copy_(weight @ by)
    if getattr(module, "bias", None) is not None:
        module.bias.copy_(module.bias @ by)  # type: ignore[operator, union-attr]


def everywhere(config: RotationConfig, count: int) -> Iterator[tuple[list[str], str, list[str]]]:
    """Entries of the configuration with numbers of blocks put in."""
    for index in range(count + 1):
        part = "first_layer" if index == 0 else "last_layer" if index == count else "middle_layers"
        here = min(index, count - 1)
        assert isinstance(config.scaling_layers, dict)
        for entry in config.scaling_layers[part]:
            lists = (entry["prev_modules"], [entry["norm_module"]], entry["next_modules"])
            put = [[name.replace("pre_layer_id", str(index - 1)).replace("layer_id", str(here)) for name in names] for names in lists]
            yield put[0], put[1][0], put[2]


@torch.no_grad()
def rotate(model: nn.Module, facts: Architecture) -> None:
    """R1 by a random rotation, in place, as the derived configuration says."""
    config = RotationConfig.for_architecture(facts)
    assert config is not None
    head = model.get_submodule(facts.head or "")
    head.weight = nn.Parameter(weights_of(head).clone())  # where it is tied to the embeddings
    q, _ = torch.linalg.qr(torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
    # What subtracts a mean does so no more once it is rotated: it never gets one.
    centre = torch.eye(WIDTH, dtype=torch.float64) - (1 / WIDTH if facts.norm_subtracts_mean else 0.0)
    for writers, norm, readers in everywhere(config, len(blocks_of(model, facts))):
        for name in (found for writer in writers for found in named_by(model, writer)):
            write(model.get_submodule(name), centre @ q)
        replacement, weight = plain(model.get_submodule(norm), facts, q)
        model.set_submodule(norm, replacement)
        for name in (found for reader in readers for found in named_by(model, reader)):
            read = weights_of(model.get_submodule(name))
            read.copy_((read * weight) @ q)


@pytest.mark.parametrize("model_type", sorted(set(ALL) - CANNOT))
def test_a_rotated_model_gives_the_same_logits(model_type: str) -> None:
    model, facts = whole_model(model_type), facts_of(model_type)
    batch = batch_for(model_type, model)
    expected = logits(model, batch)
    before = weights_of(model.get_submodule(facts.embeddings[0])).detach().clone()
    rotate(model, facts)
    assert distance(weights_of(model.get_submodule(facts.embeddings[0])).detach(), before) > 0.1
    assert distance(logits(model, batch), expected) < TOLERANCE


@pytest.mark.parametrize("model_type", sorted(CANNOT))
def test_families_whose_stream_cannot_be_rotated_give_a_reason_and_rotate_values_where_they_can(model_type: str) -> None:
    facts, settings = facts_of(model_type), get_algo_config("rotation", model_type)
    reason = RotationConfig.r1_refusal(facts)
    assert reason is not None
    assert "residual stream" in reason
    if model_type in NO_VALUES:
        assert reason in (refusal("rotation", facts) or "")
        assert settings is None
    else:
        assert refusal("rotation", facts) is None
        assert isinstance(settings, RotationConfig)
        assert (settings.r1, settings.r2, settings.r4) == (False, True, False)


@pytest.mark.parametrize("model_type", sorted(NORMED_OUTPUTS - {"exaone4", "gemma4", "olmo2", "olmo3"}))
def test_norms_on_outputs_forbid_rotation(model_type: str) -> None:
    model = whole_model(model_type)
    facts = attrs.evolve(facts_of(model_type), attention_output_norm=None, mlp_output_norm=None, embedding_norm=None)
    batch = batch_for(model_type, model)
    expected = logits(model, batch)
    rotate(model, facts)
    assert distance(logits(model, batch), expected) > 1e-3


@pytest.mark.parametrize("model_type", [t for t in ALL if facts_of(t).attention_output_norm])
def test_output_norms_read_the_outputs_named_with_them(model_type: str) -> None:
    """The last tensor that attention or MLP puts out goes into the norm, whole."""
    model, facts = whole_model(model_type), facts_of(model_type)
    for block in blocks_of(model, facts):
        for norm, writers in ((facts.attention_output_norm, facts.attention_output), (facts.mlp_output_norm, facts.mlp_output)):
            came_in: list[Tensor] = []
            went_out: list[Tensor] = []
            block.get_submodule(norm or "").register_forward_pre_hook(lambda _, args, into=came_in: into.append(args[0]))
            if writers:
                block.get_submodule(writers).register_forward_hook(lambda _, args, output, into=went_out: into.append(output))
            logits(model, {"input_ids": IDS})
            assert len(came_in) == 1
            behind_both = facts.experts_norm is not None and norm == facts.mlp_output_norm  # MLP and mixture, added up
            assert not went_out or torch.equal(came_in[0], went_out[0]) is not behind_both


def rotate_values(model: nn.Module, facts: Architecture, heads: int) -> int:
    """R2 in every block that has the modules that the facts name; returns the number of such blocks."""
    return sum(fold_r2(block, facts, heads) is None for block in blocks_of(model, facts))


@pytest.mark.parametrize("model_type", [t for t in ALL if RotationConfig.r2_refusal(facts_of(t)) is None])
def test_a_model_with_rotated_values_gives_the_same_logits(model_type: str) -> None:
    model, facts = whole_model(model_type).requires_grad_(False), facts_of(model_type)
    batch = batch_for(model_type, model)
    expected = logits(model, batch)
    count = rotate_values(model, facts, heads_of(model))
    assert (count == 0) is (model_type in GATED_BY_QUERIES)
    assert distance(logits(model, batch), expected) < TOLERANCE


@pytest.mark.parametrize("model_type", ["kimi_k3", "muse_glimmer"])
def test_a_gate_on_single_channels_forbids_rotated_values(model_type: str) -> None:
    model, facts = whole_model(model_type).requires_grad_(False), facts_of(model_type)
    batch = batch_for(model_type, model)
    expected = logits(model, batch)
    assert rotate_values(model, attrs.evolve(facts, unsupported={}), heads_of(model)) >= 1
    assert distance(logits(model, batch), expected) > 1e-3


def test_the_stream_of_a_decoder_that_attends_to_an_encoder_is_not_rotated_without_the_encoder() -> None:
    sizes = {"vocab_size": 64, "d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "encoder_layers": 0}
    model = WhisperForCausalLM(WhisperConfig(**sizes, pad_token_id=0))
    facts = architecture_of(model)
    assert facts is not None
    assert "cross-attention" in (RotationConfig.r1_refusal(facts) or "")
