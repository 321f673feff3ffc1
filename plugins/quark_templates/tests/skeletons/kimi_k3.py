"""Kimi-K3's modules.

Delta attention and gated latent attention, latent experts, and sublayers that read mixtures of earlier
outputs.

Source: the names in the checkpoint, and vLLM's and other runtimes' implementations of it.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional

from .kimi_k2 import RANK, BalancedRouter, LowRankAttention
from .parts import EXPERTS, HEAD_DIM, HEADS, HIDDEN, VOCABULARY, GatedMLP, Mixture, Skeleton

WIDE = HEADS * HEAD_DIM
KERNEL = 4
GATE_LIMIT, UP_LIMIT = 4.0, 25.0


class SaturatedMLP(GatedMLP):
    """SiTU: both the gate and what it multiplies pass a tanh."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(name) for name in self.names)
        opened = GATE_LIMIT * torch.tanh(gate(x) / GATE_LIMIT) * torch.sigmoid(gate(x))
        return down(opened * UP_LIMIT * torch.tanh(up(x) / UP_LIMIT))


class LatentMixture(Mixture):
    """Routed experts between two projections, and one expert that every token passes, at full width."""

    def __init__(self) -> None:
        shared = SaturatedMLP(width=HIDDEN)
        super().__init__(BalancedRouter(), [SaturatedMLP("w1", "w3", "w2", width=HIDDEN) for _ in range(EXPERTS)], shared)
        self.routed_expert_down_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.routed_expert_norm = nn.RMSNorm(HIDDEN)
        self.routed_expert_up_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        latent = self.routed_expert_down_proj(x)
        mixed = torch.zeros_like(latent)
        for index, expert in enumerate(self.experts):
            *token, place = torch.where(chosen == index)
            if len(place):
                mixed[tuple(token)] += expert(latent[tuple(token)]) * weights[(*token, place)].unsqueeze(-1)
        return self.routed_expert_up_proj(self.routed_expert_norm(mixed)) + self.shared_experts(x)


class GatedLatentAttention(LowRankAttention):
    """Latent attention whose output a gate multiplies, channel by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.g_proj = nn.Linear(HIDDEN, WIDE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.attended(x) * torch.sigmoid(self.g_proj(x)))


class DeltaAttention(nn.Module):
    """Linear attention with a decay for each channel of the keys.

    Queries, keys and values pass short convolutions.
    """

    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "k", "v"):
            self.add_module(f"{name}_proj", nn.Linear(HIDDEN, WIDE, bias=False))
            self.add_module(f"{name}_conv1d", nn.Conv1d(WIDE, WIDE, KERNEL, groups=WIDE, padding=KERNEL - 1, bias=False))
        self.f_a_proj = nn.Linear(HIDDEN, RANK, bias=False)
        self.f_b_proj = nn.Linear(RANK, WIDE, bias=False)
        self.b_proj = nn.Linear(HIDDEN, HEADS, bias=False)
        self.g_proj = nn.Linear(HIDDEN, WIDE, bias=False)
        self.o_norm = nn.RMSNorm(HEAD_DIM)
        self.o_proj = nn.Linear(WIDE, HIDDEN, bias=False)
        self.A_log = nn.Parameter(torch.empty(HEADS))
        self.dt_bias = nn.Parameter(torch.empty(WIDE))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._convolved(name, x) for name in ("q", "k", "v"))
        key = functional.normalize(key, dim=-1)
        decay = torch.sigmoid((self.f_b_proj(self.f_a_proj(x)) + self.dt_bias).unflatten(-1, (HEADS, -1)) * self.A_log.exp()[:, None])
        strength = torch.sigmoid(self.b_proj(x))[..., None]
        state, outputs = torch.zeros(*key[:, 0].shape, HEAD_DIM, dtype=x.dtype), []
        for t in range(x.shape[1]):
            state = state * decay[:, t, :, :, None]
            error = (value[:, t] - (state * key[:, t, :, :, None]).sum(-2)) * strength[:, t]
            state = state + key[:, t, :, :, None] * error[:, :, None]
            outputs.append((state * query[:, t, :, :, None]).sum(-2))
        normed = self.o_norm(torch.stack(outputs, 1)).flatten(2)
        return self.o_proj(normed * torch.sigmoid(self.g_proj(x)))

    def _convolved(self, name: str, x: Tensor) -> Tensor:
        projected = self.get_submodule(f"{name}_proj")(x).transpose(1, 2)
        mixed = functional.silu(self.get_submodule(f"{name}_conv1d")(projected)[..., : x.shape[1]])
        return mixed.transpose(1, 2).unflatten(-1, (HEADS, -1))


def mixture_of(earlier: tuple[Tensor, ...], x: Tensor, norm: nn.Module, score: nn.Module) -> Tensor:
    """Earlier states and the present one, weighted for each token by a projection of them."""
    states = torch.stack((*earlier, x), -2)
    return (score(norm(states)).softmax(-2) * states).sum(-2)


class MixingBlock(nn.Module):
    """Attention and MLP; each reads a norm of a mixture of earlier states."""

    def __init__(self, attention: nn.Module, mlp_name: str, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp_name = mlp_name
        self.self_attn = attention
        self.add_module(mlp_name, mlp)
        for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            self.add_module(name, nn.RMSNorm(HIDDEN))
        self.self_attention_res_proj = nn.Linear(HIDDEN, 1, bias=False)
        self.mlp_res_proj = nn.Linear(HIDDEN, 1, bias=False)

    def forward(self, x: Tensor, earlier: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        read = mixture_of(earlier, x, self.self_attention_res_norm, self.self_attention_res_proj)
        earlier = (*earlier, x)
        x = self.self_attn(self.input_layernorm(read))
        read = mixture_of(earlier, x, self.mlp_res_norm, self.mlp_res_proj)
        return x + self.get_submodule(self.mlp_name)(self.post_attention_layernorm(read)), earlier


class MixingDecoder(nn.Module):
    """Embeddings, blocks, a last mixture and a norm."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(blocks)
        self.output_attn_res_norm = nn.RMSNorm(HIDDEN)
        self.output_attn_res_proj = nn.Linear(HIDDEN, 1, bias=False)
        self.norm = nn.RMSNorm(HIDDEN)

    def forward(self, input_ids: Tensor) -> Tensor:
        x, earlier = self.embed_tokens(input_ids), ()
        for block in self.layers:
            x, earlier = block(x, earlier)
        return self.norm(mixture_of(earlier, x, self.output_attn_res_norm, self.output_attn_res_proj))


class KimiK3(Skeleton):
    """The language model beside its vision tower and projector, which text does not pass."""

    def _build(self, blocks: list[nn.Module]) -> None:
        head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.language_model = nn.ModuleDict({"model": MixingDecoder(blocks), "lm_head": head})
        seeing = nn.ModuleDict({"wqkv": nn.Linear(HIDDEN, 3 * HIDDEN), "wo": nn.Linear(HIDDEN, HIDDEN)})
        self.vision_tower = nn.ModuleDict({"encoder": nn.ModuleDict({"blocks": nn.ModuleList([seeing])})})
        self.mm_projector = nn.ModuleDict({"linear_1": nn.Linear(HIDDEN, HIDDEN), "linear_2": nn.Linear(HIDDEN, HIDDEN)})

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.lm_head

    def forward(self, input_ids: Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(logits=self.language_model.lm_head(self.language_model.model(input_ids)))


def kimi_k3() -> KimiK3:
    dense = MixingBlock(DeltaAttention(), "mlp", SaturatedMLP())
    return KimiK3("kimi_k3", [dense, MixingBlock(GatedLatentAttention(), "block_sparse_moe", LatentMixture())])
