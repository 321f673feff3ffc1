"""Internals of transformers that have no public name.

`core/tests/models/hf/test_internals.py` has a test for each.

Other uses lie where what they belong to is: names of stored tensors in `quark.models.hf.stored_tensors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "apply_gate",
    "can_set_attention",
    "initialize_what_no_checkpoint_holds",
    "is_stored_beside_weight",
    "kept_in_float32",
    "model_classes",
    "source_of",
    "without_initialization",
]


def model_classes(auto: Any, config: Any) -> tuple[type[nn.Module], ...]:
    """Return the model classes that an Auto class has for a config.

    None where it does not know the config.
    """
    mapping = auto._model_mapping
    if type(config) not in mapping:
        return ()
    classes = mapping[type(config)]
    return tuple(classes) if isinstance(classes, list | tuple) else (classes,)


def kept_in_float32(model: Any, dtype: torch.dtype) -> list[str]:
    """Return the full names of tensors that a model class keeps in float32 at that dtype."""
    from transformers.core_model_loading import build_glob_alternation

    patterns = list(model._get_dtype_plan(dtype))
    expression = build_glob_alternation(patterns)[0] if patterns else None
    return [name for name, t in model.state_dict().items() if expression is not None and t.dtype == dtype and expression.search(name)]


def initialize_what_no_checkpoint_holds(model: Any) -> None:
    """Compute the buffers that are not persistent, such as rotary tables.

    Parameters and persistent buffers stay as they are.

    The random state stays as it is too.
    """
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # to be read: without this mark, transformers draws random numbers for meta tensors too
    with torch.random.fork_rng(devices=[]):
        model.initialize_weights()


def without_initialization() -> AbstractContextManager[None]:
    """Let the body build a model whose parameters are allocated, and no random numbers drawn for them."""
    from transformers.initialization import no_init_weights

    return no_init_weights()


def source_of(config: Any) -> str:
    """Return the argument of ``from_pretrained``: a directory, or the name of a model of a hub.

    Empty where the config was not loaded.
    """
    return str(getattr(config, "_name_or_path", "") or "")


def can_set_attention(model: Any) -> bool:
    """Return whether a transformers model uses the attention interface, and so can be switched."""
    return bool(type(model)._can_set_attn_implementation())


def apply_gate(experts: Any, outputs: Sequence[Tensor]) -> Tensor:
    """Return the input of the closing projection of fused experts, by the model's own code."""
    return experts._apply_gate(torch.cat(list(outputs), dim=-1))


@cache
def is_stored_beside_weight(suffix: str) -> bool:
    """Return whether the loader looks for a stored scale beside the weight, not in a submodule.

    transformers looks there for what belongs to second levels; up to 5.19 its loader renamed those names too.
    """
    if not suffix.endswith("_2"):
        return False
    from transformers.quantizers import quantizer_quark  # only where a checkpoint of two levels is read, which transformers does anyway

    return hasattr(quantizer_quark, "CHECKPOINT_KEYS")
