"""Instella's modules. Source: AMD's published implementation for vLLM, and the names in the checkpoint."""

from __future__ import annotations

from torch import Tensor, nn

from .parts import HEAD_DIM, HEADS, KV_HEADS, LAYERS, Attention, Block, GatedMLP, Skeleton


class NormedAttention(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.RMSNorm(HEADS * HEAD_DIM)
        self.k_norm = nn.RMSNorm(KV_HEADS * HEAD_DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.attend(self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x)))


class InstellaBlock(Block):
    names = ("pre_attention_layernorm", "self_attn", "pre_feedforward_layernorm", "mlp")


def instella() -> Skeleton:
    return Skeleton("instella", [InstellaBlock(NormedAttention(), GatedMLP()) for _ in range(LAYERS)])
