"""Attention functions for the attention interface of transformers. They quantize queries, keys, values and
probabilities.

Four attributes of an attention module quantize these tensors: ``query_quantizer``, ``key_quantizer``,
``value_quantizer`` and ``prob_output_quantizer`` (for the probabilities). Each attribute is a callable or
None. The attribute ``head_basis`` is a callable that rotates queries and keys before they are quantized. If a
module has none of these attributes, the functions here compute the same as transformers. Queries, keys and
values are quantized after their norms and the rotary embedding, because runtimes cache keys and values in
this form. Source: the interface of transformers 5 (``AttentionInterface``).
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

The rotation expresses queries and keys in another orthogonal basis before keys are quantized. A head's tensor
has the shape ``[…, d]``. The rotation alone does not change the logits, because queries and keys are rotated
in the same way.
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

    This function computes the same as the implementation ``eager`` of transformers, but quantizes queries,
    keys, values and probabilities.

    Args:
        module: The attention module that calls this function. Its attributes are the quantizers.
        query: The queries, with the shape ``[batch, heads, queries, d]``.
        key: The keys, with the shape ``[batch, key heads, keys, d]``. The number ``heads`` is a multiple of
            ``key heads``.
        value: The values, with the shape ``[batch, key heads, keys, dv]``.
        attention_mask: A tensor that is added to the logits. Its shape must be broadcastable to ``[batch,
            heads, queries, keys]``.
        scaling: A factor by which the logits are multiplied. None means ``1 / sqrt(d)``.
        dropout: The dropout probability in training.
        softcap: If given, ``tanh`` limits the logits to the range ``(-softcap, softcap)``.
        s_aux: Attention sinks, with the shape ``[heads]``: one logit per head. The softmax includes the
            sinks, but they have no values.
        position_bias: A tensor that is added to the logits, like ``attention_mask``.

    Returns:
        The output with the shape ``[batch, queries, heads, dv]``, and the probabilities with the shape
        ``[batch, heads, queries, keys]``. Both have the dtype of ``query``.
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
    """Quantize queries, keys and values, and return the output of the implementation ``sdpa`` of
    transformers.

    `eager_attention` describes the arguments. The second result is None, because ``sdpa`` does not return
    probabilities.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    query, key, value = _states(module, query, key, value)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **options)


def _softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the attention probabilities. The last axis of ``logits`` is the keys.

    The probabilities are float32. If ``sinks`` is given, they have the dtype of the logits instead, like in
    the models of transformers that have sinks.
    """
    if sinks is None:
        return torch.softmax(logits, dim=-1, dtype=torch.float32)
    extended = torch.cat([logits, sinks.reshape(1, -1, 1, 1).expand(*logits.shape[:-1], 1)], dim=-1)
    extended = extended - extended.max(dim=-1, keepdim=True).values
    return torch.softmax(extended, dim=-1)[..., :-1]


def _repeated(x: Tensor, groups: int) -> Tensor:
    """Return ``x`` with each head repeated ``groups`` times. Grouped-query attention needs this.

    ``x`` has the shape ``[batch, heads, tokens, d]``.
    """
    return x if groups == 1 else x[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)


def _states(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Apply the rotation and the quantizers of ``module`` to queries, keys and values, and return the
    results."""
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
