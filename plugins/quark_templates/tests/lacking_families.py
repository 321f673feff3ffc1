"""Families that the installed transformers does not have, or cannot compute: their tests are skipped."""

from __future__ import annotations

from functools import cache

import torch

from quark.base.version import transformers_version
from quark_templates.examples import tiny_model
from quark_templates.plugin import CONVOLUTIONAL, DENSE, MIXTURES, MULTIMODAL, OWN_FORMS, TEXT_PARTS

IN_TRANSFORMERS = {*DENSE, *MIXTURES, *CONVOLUTIONAL, *MULTIMODAL, *OWN_FORMS, *TEXT_PARTS}


@cache
def why_lacking(model_type: str) -> str | None:
    """Return why there is no model of a family in the installed transformers; None where there is one."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return f"transformers {transformers_version()} has no {model_type}"
    if model_type == "dbrx" and not _computes_dbrx():
        return f"transformers {transformers_version()} cannot compute its own {model_type}"
    return None


def _computes_dbrx() -> bool:
    """Return whether experts may be wider than the model, which transformers has not always allowed."""
    try:
        tiny_model("dbrx")(torch.zeros(1, 2, dtype=torch.long))
    except RuntimeError:
        return False
    return True
