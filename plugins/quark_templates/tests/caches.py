"""Options of a quantized cache by family.

For what runtimes do not cache, the convention of AMD Quark has to be asked for.
"""

from __future__ import annotations

from typing import Any

__all__ = ["LATENT", "REFUSED", "eight_bit_cache"]

LATENT = {
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_k2",
    "kimi_k25",
    "kimi_k3",
    "glm5_next",
}
"""Latent attention. Names have a ``q`` in both factors of the query projection; queries are what the second
gives.
"""

REFUSED = LATENT | {"qwen3_next"}
"""Latent attention, and a family whose patterns name projections of linear attention, which has no cache of
keys and values.
"""


def eight_bit_cache(model_type: str) -> dict[str, Any]:
    """An FP8 cache; as AMD Quark rounds it where anything else is refused."""
    return {"kv_cache_scheme": "fp8"} | ({"kv_cache_post_rope": False} if model_type in REFUSED else {})
