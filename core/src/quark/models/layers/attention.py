"""Attention functions for transformers' attention interface that quantize their tensors.

Four attributes of an attention module quantize its tensors: ``prob_output_quantizer`` (for probabilities),
``query_quantizer``, ``key_quantizer`` and ``value_quantizer``. Each one is a callable or None. Before these
quantizers run, the attribute ``head_basis`` rotates queries and keys. Without these attributes, the functions
here compute the same as transformers. Queries, keys and values are quantized after their norms and the rotary
embedding, because runtimes cache keys and values in this form. Source: the interface of transformers 5
(``AttentionInterface``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

PROBABILITIES = "prob_output_quantizer"
"""Attribute of an attention module that quantizes its probabilities.

Checkpoint loaders find the scales of the probabilities under the same name.
"""

QUERY, KEY, VALUE = STATES = ("query_quantizer", "key_quantizer", "value_quantizer")
"""Attributes of an attention module that quantize its queries, keys and values after the rotary embedding."""

STORED_STATES = {QUERY: "q", KEY: "k", VALUE: "v"}
"""Prefixes of the scales of `STATES` in checkpoints, if the states come from a fused projection.

For instance, the scale of the keys is ``k_scale`` of the attention module. vLLM and SGLang read these names.
They do not read a scale that is stored with a fused projection.
"""

CALIBRATION = "states_in_calibration"
"""Attribute of an attention module that calibration sets temporarily.

It is a callable whose arguments and results are queries, keys and values. If it is set, the quantizers of
`STATES` do not run.
"""

BASIS = "head_basis"
"""Attribute of an attention module: a callable that rotates the queries and keys of each head.

It expresses them in another orthogonal basis before keys are quantized. A head's tensor has the shape
``[…, d]``. The rotation alone changes no logit, because queries and keys are rotated alike.
"""


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return the output of attention and its probabilities.

    This is transformers' ``eager`` implementation with quantizers: it materializes the probabilities.

    Args:
        module: The calling attention module, whose attributes hold the quantizers.
        query: ``[batch, heads, queries, d]``.
        key: ``[batch, key heads, keys, d]``; ``heads`` is a multiple of ``key heads``.
        value: ``[batch, key heads, keys, dv]``.
        attention_mask: A tensor that is added to the logits; broadcastable to ``[batch, heads, queries,
            keys]``.
        scaling: Factor of the logits; None means ``1 / sqrt(d)``.
        dropout: Dropout probability in training.
        softcap: If given, ``tanh`` limits the logits to the range ``(-softcap, softcap)``.
        s_aux: Attention sinks, one logit per head ``[heads]``. They are part of the softmax, but no value
            belongs to them.
        position_bias: A tensor that is added to the logits, like the mask.

    Returns:
        The output ``[batch, queries, heads, dv]``, and the probabilities ``[batch, heads, queries, keys]``
        that it was computed with. Both have the dtype of ``query``.
    """
    query, key, value = _states(module, query, key, value)
    groups = query.shape[1] // key.shape[1]
    logits = torch.matmul(query, _repeated(key, groups).transpose(2, 3)) * (1 / math.sqrt(query.shape[-1]) if scaling is None else scaling)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    for bias in (position_bias, attention_mask):
        logits = logits if bias is None else logits + bias
    # Quantized in the precision of the softmax: an earlier cast to the model's dtype would round twice.
    probabilities = _applied(module, PROBABILITIES, _softmax(logits, s_aux)).to(query.dtype)
    probabilities = functional.dropout(probabilities, p=dropout, training=module.training)
    return torch.matmul(probabilities, _repeated(value, groups)).transpose(1, 2).contiguous(), probabilities


def sdpa_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the output of transformers' ``sdpa`` attention with quantized queries, keys and values.

    The second result is None in place of the probabilities. The arguments are those of `eager_attention`.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    query, key, value = _states(module, query, key, value)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **options)


def _softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Return probabilities over the keys, in float32.

    If there are sinks, the probabilities have the dtype of the logits, as in transformers' models with sinks.
    """
    if sinks is None:
        return torch.softmax(logits, dim=-1, dtype=torch.float32)
    extended = torch.cat([logits, sinks.reshape(1, -1, 1, 1).expand(*logits.shape[:-1], 1)], dim=-1)
    extended = extended - extended.max(dim=-1, keepdim=True).values
    return torch.softmax(extended, dim=-1)[..., :-1]


def _repeated(x: Tensor, groups: int) -> Tensor:
    """Return ``x [batch, heads, tokens, d]`` with each head repeated ``groups`` times.

    Grouped-query attention needs this.
    """
    return x if groups == 1 else x[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)


def _states(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries, keys and values after the rotation and the quantizers that ``module`` has."""
    query, key = _applied(module, BASIS, query), _applied(module, BASIS, key)
    calibration = getattr(module, CALIBRATION, None)
    if calibration is not None:
        return calibration(query, key, value)
    return _applied(module, QUERY, query), _applied(module, KEY, key), _applied(module, VALUE, value)


def _applied(module: nn.Module, name: str, x: Tensor) -> Tensor:
    """Apply the callable in the attribute ``name`` of ``module`` to ``x``, and return the result.

    If the attribute is missing or None, return ``x``.
    """
    function = getattr(module, name, None)
    return x if function is None else function(x)
