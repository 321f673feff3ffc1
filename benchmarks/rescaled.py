"""Rescale channels of a model by random factors that cancel: the weights change, but not the outputs.

A setting that is better by chance for one set of weights is not better for all sets. In some pairs of layers,
such as a norm and the projections after it, the first layer's channels can be divided by factors if the
second layer's are multiplied by them. Each channel of such a pair is rescaled by ``exp(0.3 z)`` with standard
normal z.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quark.config.templates import LLMTemplate
from quark.models.plan.decoder_blocks import decoder_blocks
from quark.models.plan.family import text_config
from quark_algos.mappings.fold import fold
from quark_algos.mappings.mapping import mappings_of
from quark_algos.mappings.resolve import resolve

SPREAD = 0.3
MOST_CHANGE = 1e-2
"""Largest change of the logits, relative to their norm, that summation in another order explains."""


@torch.no_grad()
def rescale(model: nn.Module, seed: int, tokens: Tensor) -> int:
    """Rescale the channels of a float32 model in place; return the number of rescaled pairs of layers.

    Args:
        model: A model of transformers.
        seed: Seed of the factors; 0 leaves the weights unchanged.
        tokens: Tokens ``[sequences, length]`` on which the logits are checked.

    Raises:
        ValueError: Rescaling changes the logits.
    """
    if seed == 0:
        return 0
    architecture = LLMTemplate.get(model.config.model_type).architecture  # type: ignore[union-attr, arg-type]
    generator, before, count = torch.Generator().manual_seed(seed), model(tokens).logits, 0
    for block in decoder_blocks(model, architecture):
        for mapping in mappings_of(architecture):
            resolved = resolve(mapping, block.module, architecture, text_config(model).num_attention_heads)
            for pair in () if isinstance(resolved, str) else resolved:  # a string gives the reason that this block has no such pair
                fold(pair, torch.exp(SPREAD * torch.randn(pair.channels.count, generator=generator)))
                count += 1
    change = float((model(tokens).logits - before).norm() / before.norm())
    if not change < MOST_CHANGE:
        raise ValueError(
            f"rescaling changes the logits by {change:.2g} of their norm: in this model, the factors of some pair of layers do not cancel. "
            f"Give --seeds 0"
        )
    return count
