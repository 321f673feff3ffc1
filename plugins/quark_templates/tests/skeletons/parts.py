"""Parts of module skeletons.

Attention, gated MLPs, mixtures and the frame of a language model, under names that a family gives.

A skeleton has the names and the wiring of a family's published code, so that what is said of the family can
be checked on it; it leaves out rotary embeddings and the cache, which no fact is about. Its attention
remembers what would have entered the cache.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig

VOCABULARY, HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS, EXPERTS, CHOSEN = 64, 32, 64, 4, 2, 8, 2, 4, 2


class Attending(nn.Module):
    """Causal attention between whatever projections a family has."""

    entered: tuple[Tensor, Tensor]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, kv_heads: int = KV_HEADS) -> Tensor:
        """From ``[batch, tokens, heads * dim]`` to the same shape as the queries."""
        self.entered = (key, value)
        q, k, v = (
            states.unflatten(-1, (heads, -1)).transpose(1, 2) for states, heads in ((query, HEADS), (key, kv_heads), (value, kv_heads))
        )
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads < HEADS).transpose(1, 2).flatten(2)


class Attention(Attending):
    """Three projections in and one out, by their common names."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.attend(self.q_proj(x), self.k_proj(x), self.v_proj(x)))


class GatedMLP(nn.Module):
    """Three projections, whose names are given: of the gate, of what it multiplies, of the output."""

    def __init__(self, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj", width: int = WIDTH) -> None:
        super().__init__()
        self.names = (gate, up, down)
        for name in self.names:
            self.add_module(name, nn.Linear(width, HIDDEN, bias=False) if name == down else nn.Linear(HIDDEN, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(name) for name in self.names)
        return down(functional.silu(gate(x)) * up(x))


class Router(nn.Module):
    """The router of DeepSeek's code: a matrix of its own that is no linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class Mixture(nn.Module):
    """A router, experts that are modules of their own, and perhaps one that every token passes."""

    def __init__(self, gate: nn.Module, experts: list[GatedMLP], shared_experts: GatedMLP | None = None) -> None:
        super().__init__()
        self.gate = gate
        self.experts = nn.ModuleList(experts)
        if shared_experts is not None:
            self.shared_experts = shared_experts

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(CHOSEN, dim=-1)
        result = self.shared_experts(x) if hasattr(self, "shared_experts") else torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            *token, place = torch.where(chosen == index)
            if len(place):
                result[tuple(token)] += expert(x[tuple(token)]) * weights[(*token, place)].unsqueeze(-1)
        return result


def mixture(gate: type[nn.Module] = Router) -> Mixture:
    """The mixture of DeepSeek's code."""
    return Mixture(gate(), [GatedMLP(width=HIDDEN) for _ in range(EXPERTS)], GatedMLP(width=HIDDEN))


class Block(nn.Module):
    """Norm, attention, norm, MLP, each pair around a residual connection.

    A subclass gives them their names.
    """

    names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")

    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        for name, module in zip(self.names, (nn.RMSNorm(HIDDEN), attention, nn.RMSNorm(HIDDEN), mlp), strict=True):
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        first_norm, attention, second_norm, mlp = (self.get_submodule(name) for name in self.names)
        x = x + attention(first_norm(x))
        return x + mlp(second_norm(x))


class Decoder(nn.Module):
    """Embeddings, blocks and a norm, by their common names."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(HIDDEN)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        for block in self.layers:
            x = block(x)
        return self.norm(x)


class Skeleton(nn.Module):
    """A language model of one family: ``model`` and ``lm_head``, unless a subclass has them elsewhere."""

    def __init__(self, model_type: str, blocks: list[nn.Module]) -> None:
        super().__init__()
        # The type is read off the class of a configuration when it is written.
        self.config: PreTrainedConfig = type("SkeletonConfig", (PreTrainedConfig,), {"model_type": model_type})()
        self._build(blocks)
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(mean=float(parameter.ndim == 1), std=0.2)
        self.eval()

    def _build(self, blocks: list[nn.Module]) -> None:
        self.model = Decoder(blocks)
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(logits=self.lm_head(self.model(input_ids)))
