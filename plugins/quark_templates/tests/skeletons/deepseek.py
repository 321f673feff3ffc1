"""DeepSeek-MoE's modules, a dense block before mixtures.

Source: vLLM's deepseek_v2.py and the names in the checkpoint.
"""

from __future__ import annotations

from .parts import Attention, Block, GatedMLP, Skeleton, mixture


def deepseek() -> Skeleton:
    return Skeleton("deepseek", [Block(Attention(), GatedMLP()), Block(Attention(), mixture())])
