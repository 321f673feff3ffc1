"""Switches a transformers model to attention that can be quantized, through transformers' own registries.

No function of torch is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from quark.errors import UnsupportedError
from quark.models.hf.internals import can_set_attention
from quark.models.layers.attention import eager_attention, sdpa_attention

_EAGER, _SDPA = "quark_eager", "quark_sdpa"
_WITHOUT = "Leave attention_scheme out, and leave kv_cache_post_rope out or set it to False"
_BASES = {"eager": "eager", "sdpa": "sdpa", _EAGER: "eager", _SDPA: "sdpa"}


def why_unswitchable(model: nn.Module, attentions: Sequence[str]) -> str | None:
    """Return why these attention modules of ``model`` cannot be switched, with the fix, or None."""
    cause = None
    if not hasattr(model, "set_attn_implementation"):
        cause = "only transformers models have an attention that can be exchanged"
    elif not can_set_attention(model):
        cause = "its code does not use transformers' attention interface"
    if cause is not None:
        return f"the attention of a {type(model).__name__} cannot be quantized: {cause}. {_WITHOUT}"
    for name in attentions:
        implementation = _implementation(model, name)
        if implementation not in _BASES:
            return (
                f"'{name}' runs the attention implementation {implementation!r}, which hides its probabilities and keys: load "
                "the model with attn_implementation='eager' or 'sdpa', or call model.set_attn_implementation('eager') first"
            )
    return None


def refuse_unswitchable(model: nn.Module, attentions: Sequence[str]) -> None:
    """Raise UnsupportedError, before any work, if these attention modules of ``model`` cannot be switched."""
    reason = why_unswitchable(model, attentions) if attentions else None
    if reason is not None:
        raise UnsupportedError(reason)


def switch_attention(model: nn.Module, attentions: Sequence[str], *, eager: bool) -> None:
    """Make these attention modules call `quark.models.layers.attention`.

    A saved config does not show this: transformers never stores the implementation.

    Args:
        model: A transformers model on any device, changed in place.
        attentions: Full names of its attention modules.
        eager: Whether probabilities must be in memory; if not, "sdpa" stays fused and "eager" stays eager.

    Raises:
        UnsupportedError: As `refuse_unswitchable` does.
    """
    refuse_unswitchable(model, attentions)
    _register()
    configs = {id(c): (c, name) for name in attentions if (c := getattr(model.get_submodule(name), "config", None)) is not None}
    for config, name in configs.values() or [(model.config, "")]:
        base = _BASES[_implementation(model, name)]
        target = _EAGER if eager or base == "eager" else _SDPA
        # If the model has several parts (text, vision), only the part with these modules is switched.
        part = next((key for key in getattr(model.config, "sub_configs", {}) if getattr(model.config, key, None) is config), None)
        model.set_attn_implementation(target if part is None else {part: target})  # type: ignore[operator]


def _implementation(model: nn.Module, name: str) -> Any:
    config = getattr(model.get_submodule(name), "config", None) or model.config
    return getattr(config, "_attn_implementation", None)


def _register() -> None:
    """Register both implementations, with the masks of the implementations that they replace.

    This happens on first use, because transformers is slow to import.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name, function in ((_EAGER, eager_attention), (_SDPA, sdpa_attention)):
        ALL_ATTENTION_FUNCTIONS.register(name, function)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[_BASES[name]])
