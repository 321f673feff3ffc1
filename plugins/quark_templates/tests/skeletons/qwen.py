"""The first Qwen's modules.

Source: the published modeling_qwen.py: its MLP is ``c_proj(w1(x) * silu(w2(x)))``.
"""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor, nn

from .parts import HEADS, HIDDEN, LAYERS, VOCABULARY, Attending, Block, GatedMLP, Skeleton


class QWenAttention(Attending):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(HIDDEN, 3 * HIDDEN, bias=True)
        self.c_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.attend(*self.c_attn(x).chunk(3, dim=-1), kv_heads=HEADS))


class QWenBlock(Block):
    names = ("ln_1", "attn", "ln_2", "mlp")


class Transformer(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, HIDDEN)
        self.h = nn.ModuleList(blocks)
        self.ln_f = nn.RMSNorm(HIDDEN)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids)
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


class QWen(Skeleton):
    def _build(self, blocks: list[nn.Module]) -> None:
        self.transformer = Transformer(blocks)
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.wte

    def forward(self, input_ids: Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(logits=self.lm_head(self.transformer(input_ids)))


def qwen() -> QWen:
    return QWen("qwen", [QWenBlock(QWenAttention(), GatedMLP("w2", "w1", "c_proj")) for _ in range(LAYERS)])
