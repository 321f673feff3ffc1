"""ChatGLM's modules. Source: vLLM's chatglm.py and the names in ChatGLM3's checkpoints."""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor, nn
from torch.nn import functional

from .parts import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCABULARY, WIDTH, Attending, Block, Skeleton


class SelfAttention(Attending):
    sizes = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(HIDDEN, sum(self.sizes), bias=True)
        self.dense = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(self.attend(*self.query_key_value(x).split(self.sizes, dim=-1)))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(HIDDEN, 2 * WIDTH, bias=False)
        self.dense_4h_to_h = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.dense_h_to_4h(x).chunk(2, dim=-1)
        return self.dense_4h_to_h(functional.silu(gate) * up)


class GLMBlock(Block):
    names = ("input_layernorm", "self_attention", "post_attention_layernorm", "mlp")


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, HIDDEN)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.word_embeddings(input_ids)


class Encoder(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)
        self.final_layernorm = nn.RMSNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x)
        return self.final_layernorm(x)


class Transformer(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.encoder = Encoder(blocks)
        self.output_layer = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.output_layer(self.encoder(self.embedding(input_ids)))


class ChatGLM(Skeleton):
    def _build(self, blocks: list[nn.Module]) -> None:
        self.transformer = Transformer(blocks)

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.embedding.word_embeddings

    def get_output_embeddings(self) -> nn.Module:
        return self.transformer.output_layer

    def forward(self, input_ids: Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(logits=self.transformer(input_ids))


def chatglm() -> ChatGLM:
    return ChatGLM("chatglm", [GLMBlock(SelfAttention(), MLP()) for _ in range(LAYERS)])
