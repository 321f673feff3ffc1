"""Families that the installed transformers does not have, or cannot compute: their tests are skipped."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from quark.base.version import transformers_version
from quark.models.plan.mixtures import fused_mixtures
from quark_templates.examples import tiny_model
from quark_templates.plugin import CONVOLUTIONAL, DENSE, MIXTURES, MULTIMODAL, OWN_FORMS, TEXT_PARTS

IN_TRANSFORMERS = {*DENSE, *MIXTURES, *CONVOLUTIONAL, *MULTIMODAL, *OWN_FORMS, *TEXT_PARTS}


@cache
def why_lacking(model_type: str) -> str | None:
    """Return why there is no model of a family in the installed transformers; None if there is one."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return f"transformers {transformers_version()} has no {model_type}"
    if model_type in _FORMS and not _is_in_form(model_type):
        return f"transformers {transformers_version()} has {model_type} in another form"
    return None


def _is_in_form(model_type: str) -> bool:
    try:
        return _FORMS[model_type](tiny_model(model_type))
    except StrictDataclassError:  # its configuration knew fewer kinds of layers
        return False


def _computes(model: nn.Module) -> bool:
    """Return whether a model runs.

    DBRX up to 5.12 does not if its experts are wider than the model, nor Llama 4 of 5.24 without an image.
    """
    try:
        model(torch.zeros(1, 2, dtype=torch.long))
    except (RuntimeError, AttributeError):
        return False
    return True


_FORMS: dict[str, Callable[[nn.Module], bool]] = {
    "dbrx": _computes,
    "glm5_next": lambda _: True,
    "glm_moe_dsa": lambda model: bool(fused_mixtures(model)),
    "gpt_neox": lambda model: hasattr(model, "lm_head"),
    "granitemoehybrid": lambda model: bool(fused_mixtures(model)),
    "llama4": _computes,
    "qwen4_exp": lambda _: True,
    "qwen4_exp_text": lambda _: True,
}
"""Whether a family that has changed is in the form that its template is written for."""
