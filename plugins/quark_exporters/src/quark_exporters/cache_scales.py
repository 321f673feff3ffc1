"""Scales of a KV cache that lie with an attention module, which a source of weights alone leaves out."""

from __future__ import annotations

from collections.abc import Container

from quark.models.layers.attention import STORED_STATES

__all__ = ["cache_scales"]


def cache_scales(layer: str, stored: Container[str]) -> tuple[str, ...]:
    """Return the names of scales of queries, keys and values that are stored beside a layer.

    >>> cache_scales("model.layers.0.self_attn.k_proj", {"model.layers.0.self_attn.k_scale"})
    ('model.layers.0.self_attn.k_scale',)
    """
    attention = layer.rpartition(".")[0]
    names = (f"{attention}.{state}_scale" for state in STORED_STATES.values())
    return tuple(name for name in names if name in stored)
