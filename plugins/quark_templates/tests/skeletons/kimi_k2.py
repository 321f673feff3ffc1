"""Kimi-K2's modules: DeepSeek-V3's. Source: vLLM's deepseek_v2.py and the names in the checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .parts import EXPERTS, HEAD_DIM, HEADS, HIDDEN, Attending, Block, GatedMLP, Router, Skeleton, mixture

RANK = 32
ROTARY = 8


class LowRankAttention(Attending):
    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj = nn.Linear(HIDDEN, RANK, bias=False)
        self.q_a_layernorm = nn.RMSNorm(RANK)
        self.q_b_proj = nn.Linear(RANK, HEADS * (HEAD_DIM + ROTARY), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(HIDDEN, RANK + ROTARY, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(RANK)
        self.kv_b_proj = nn.Linear(RANK, HEADS * 2 * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.attended(x))

    def attended(self, x: Tensor) -> Tensor:
        """Return the input of the output projection."""
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        compressed, rotary = self.kv_a_proj_with_mqa(x).split((RANK, ROTARY), dim=-1)
        both = self.kv_b_proj(self.kv_a_layernorm(compressed)).unflatten(-1, (HEADS, -1))
        plain, value = both.chunk(2, dim=-1)
        key = torch.cat((plain, rotary.unsqueeze(-2).expand(*plain.shape[:-1], ROTARY)), dim=-1)
        return self.attend(query, key.flatten(2), value.flatten(2), HEADS)


class BalancedRouter(Router):
    def __init__(self) -> None:
        super().__init__()
        self.e_score_correction_bias = nn.Parameter(torch.empty(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.e_score_correction_bias


def kimi_k2() -> Skeleton:
    return Skeleton("kimi_k2", [Block(LowRankAttention(), GatedMLP()), Block(LowRankAttention(), mixture(BalancedRouter))])
