"""Narrower models of a class, for measurements of a block, and the numbers of experts in a config."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from quark.base.torch_state import building

__all__ = ["experts_per_token", "narrowed", "narrower_models"]

_NARROWEST, _MULTIPLE = 512, 128
"""The least width of a narrowed model, and a divisor of its intermediate widths."""

_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k_experts")
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
"""Attributes of transformers configs: `_CHOSEN` are for the experts per token, `_EXPERTS` for all experts."""


def experts_per_token(config: Any) -> tuple[int | None, int | None]:
    """Return the number of experts that process a token, and the number of all experts of a layer.

    A number is None if the config does not have it.
    """
    return next(iter(_counts(config, _CHOSEN).values()), None), next(iter(_counts(config, _EXPERTS).values()), None)


def narrowed(config: Any, layers: int) -> Any:
    """Return a config for ``layers`` decoder blocks with half as many channels, heads and experts.

    The size of a head and the number of experts per token do not change. There remain at least 512 channels,
    and at least twice as many experts as a token uses. Return None if nothing can be halved.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    halved: dict[str, int] = {}
    width, heads, key_heads = (getattr(text, name, None) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if isinstance(width, int) and isinstance(heads, int) and width >= 2 * _NARROWEST and width % 2 == heads % 2 == 0:
        halved |= {"hidden_size": width // 2, "num_attention_heads": heads // 2}
        if isinstance(key_heads, int):
            halved["num_key_value_heads"] = math.gcd(heads // 2, max(1, key_heads // 2))
        inner = {name: size for name, size in vars(text).items() if name.endswith("intermediate_size") and isinstance(size, int)}
        halved |= {name: max(_MULTIPLE, size // 2 // _MULTIPLE * _MULTIPLE) for name, size in inner.items()}
    experts, chosen = _counts(text, _EXPERTS), max(_counts(text, _CHOSEN).values(), default=1)
    halved |= {name: count // 2 for name, count in experts.items() if count % 2 == 0 and count >= 4 * chosen}
    for name, value in halved.items():
        setattr(text, name, value)
    return config if halved else None


def _counts(config: Any, names: tuple[str, ...]) -> dict[str, int]:
    """Return a dictionary of the attributes in ``names`` whose value in the config is a positive integer."""
    values = {name: getattr(config, name, None) for name in names}
    return {name: n for name, n in values.items() if isinstance(n, int) and not isinstance(n, bool) and n > 0}


def narrower_models(model: nn.Module, layers: int) -> Iterator[nn.Module]:
    """Yield models of the same class as ``model``, each about half as wide as the model before it.

    The first one is about half as wide as ``model``. The models have fewer channels, attention heads and
    experts, and only ``layers`` decoder blocks. They are on the meta device. Nothing is yielded if ``model``
    is not a model of transformers.
    """
    from transformers import PretrainedConfig

    config: Any = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        return
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    build: Any = type(model)
    while (config := narrowed(config, layers)) is not None:
        with building(), torch.device("meta"):
            narrower: nn.Module = build(config)
        yield narrower.to(dtype).eval()
