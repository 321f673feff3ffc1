"""DeepSeek-OCR's modules: DeepSeek-MoE's decoder, which also holds two vision towers and a projector.

Text passes none of them.

Source: vLLM's deepseek_ocr.py and the names in the checkpoint, whose config.json has the type
``deepseek_vl_v2``.
"""

from __future__ import annotations

from torch import nn

from .parts import HIDDEN, WIDTH, Attention, Block, GatedMLP, Skeleton, mixture


def towers() -> dict[str, nn.Module]:
    """Modules of the kinds and names that the towers have, as far as patterns could reach them."""
    sam_block = nn.ModuleDict(
        {
            "attn": nn.ModuleDict({"qkv": nn.Linear(HIDDEN, 3 * HIDDEN), "proj": nn.Linear(HIDDEN, HIDDEN)}),
            "mlp": nn.ModuleDict({"lin1": nn.Linear(HIDDEN, WIDTH), "lin2": nn.Linear(WIDTH, HIDDEN)}),
        }
    )
    clip_block = nn.ModuleDict(
        {
            "self_attn": nn.ModuleDict({"qkv_proj": nn.Linear(HIDDEN, 3 * HIDDEN), "out_proj": nn.Linear(HIDDEN, HIDDEN)}),
            "mlp": nn.ModuleDict({"fc1": nn.Linear(HIDDEN, WIDTH), "fc2": nn.Linear(WIDTH, HIDDEN)}),
        }
    )
    patches = nn.ModuleDict({"proj": nn.Conv2d(3, HIDDEN, kernel_size=16, stride=16)})
    return {
        "sam_model": nn.ModuleDict({"patch_embed": patches, "blocks": nn.ModuleList([sam_block])}),
        "vision_model": nn.ModuleDict({"transformer": nn.ModuleDict({"layers": nn.ModuleList([clip_block])})}),
        "projector": nn.ModuleDict({"layers": nn.Linear(2 * HIDDEN, HIDDEN)}),
    }


class DeepseekOCR(Skeleton):
    def _build(self, blocks: list[nn.Module]) -> None:
        super()._build(blocks)
        for name, tower in towers().items():
            self.model.add_module(name, tower)


def deepseek_vl_v2() -> DeepseekOCR:
    return DeepseekOCR("deepseek_vl_v2", [Block(Attention(), GatedMLP()), Block(Attention(), mixture())])
