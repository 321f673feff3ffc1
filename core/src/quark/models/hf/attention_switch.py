"""Functions that make a transformers model use quark's attention functions, which can quantize tensors.

This module registers the attention functions with transformers. It replaces no function of torch.
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
    """Return the reason why the modules ``attentions`` of ``model`` cannot use quark's attention functions.

    The text includes a fix. The result is None if the modules can use quark's attention functions.
    """
    cause = None
    if not hasattr(model, "set_attn_implementation"):
        cause = "only the attention of transformers models can be replaced"
    elif not can_set_attention(model):
        cause = "its code does not use transformers' attention interface"
    if cause is not None:
        return f"the attention of a {type(model).__name__} cannot be quantized: {cause}. {_WITHOUT}"
    for name in attentions:
        implementation = _implementation(model, name)
        if implementation not in _BASES:
            return (
                f"'{name}' uses the attention implementation {implementation!r}, which hides its probabilities and keys. Load "
                "the model with attn_implementation='eager' or 'sdpa', or call model.set_attn_implementation('eager') first"
            )
    return None


def refuse_unswitchable(model: nn.Module, attentions: Sequence[str]) -> None:
    """Raise UnsupportedError if the modules ``attentions`` cannot use quark's attention functions.

    Call this function at the start of a run, before it does any work.
    """
    reason = why_unswitchable(model, attentions) if attentions else None
    if reason is not None:
        raise UnsupportedError(reason)


def switch_attention(model: nn.Module, attentions: Sequence[str], *, eager: bool) -> None:
    """Let the modules ``attentions`` of ``model`` use the functions in `quark.models.layers.attention`.

    This change has no effect on a saved config, because transformers does not save the attention
    implementation.

    Args:
        model: A transformers model on any device, which is changed in place.
        attentions: Full names of attention modules of the model.
        eager: Whether all modules use the kind "eager", which computes the attention probabilities as a
            tensor that can be quantized. If False, each module keeps its kind of implementation, "sdpa" or
            "eager".

    Raises:
        UnsupportedError: A module cannot use quark's attention functions.
    """
    refuse_unswitchable(model, attentions)
    _register()
    configs = {id(c): (c, name) for name in attentions if (c := getattr(model.get_submodule(name), "config", None)) is not None}
    for config, name in configs.values() or [(model.config, "")]:
        base = _BASES[_implementation(model, name)]
        target = _EAGER if eager or base == "eager" else _SDPA
        # If the model has several parts (text, vision), only the part with these modules is changed.
        part = next((key for key in getattr(model.config, "sub_configs", {}) if getattr(model.config, key, None) is config), None)
        model.set_attn_implementation(target if part is None else {part: target})  # type: ignore[operator]


def _implementation(model: nn.Module, name: str) -> Any:
    """Return the name of the attention implementation that the module ``name`` uses."""
    config = getattr(model.get_submodule(name), "config", None) or model.config
    return getattr(config, "_attn_implementation", None)


def _register() -> None:
    """Register quark's attention functions with transformers.

    Each attention function gets the mask function of the implementation that it replaces. This function
    imports transformers, which is slow, so it is called when attention is first switched.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name, function in ((_EAGER, eager_attention), (_SDPA, sdpa_attention)):
        ALL_ATTENTION_FUNCTIONS.register(name, function)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[_BASES[name]])
