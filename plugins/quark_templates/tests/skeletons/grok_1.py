"""Grok-1's modules, each part of a block between two norms.

Source: vLLM's implementation and the names in the checkpoint.
"""

from __future__ import annotations

from torch import Tensor, nn

from .parts import EXPERTS, HIDDEN, LAYERS, Attention, GatedMLP, Mixture, Skeleton


class GrokBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        experts = [GatedMLP("linear", "linear_v", "linear_1") for _ in range(EXPERTS)]
        self.moe_block = Mixture(nn.Linear(HIDDEN, EXPERTS, bias=False), experts)
        self.pre_attn_norm = nn.RMSNorm(HIDDEN)
        self.post_attn_norm = nn.RMSNorm(HIDDEN)
        self.pre_moe_norm = nn.RMSNorm(HIDDEN)
        self.post_moe_norm = nn.RMSNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.post_attn_norm(self.attn(self.pre_attn_norm(x)))
        return x + self.post_moe_norm(self.moe_block(self.pre_moe_norm(x)))


def grok_1() -> Skeleton:
    return Skeleton("grok-1", [GrokBlock() for _ in range(LAYERS)])
