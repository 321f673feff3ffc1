"""Plan notes about mappings that do not apply to some blocks, before any work: one line for each mapping and reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from quark.config.architecture import Architecture
from quark.models.plan.decoder_blocks import decoder_blocks
from quark_algos.mappings.resolve import resolve
from quark_algos.mappings.user_mappings import UserMapping

__all__ = ["skipped_mappings"]


def skipped_mappings(mappings: Sequence[UserMapping], model: nn.Module, facts: Architecture, heads: int) -> tuple[str, ...]:
    """Return a plan note for each mapping and each reason why it does not apply to some blocks.

    Args:
        mappings: The mappings of the configuration, or all of the architecture.
        model: The whole model; meta tensors suffice.
        facts: Architecture of the model.
        heads: Number of query heads of its attention.
    """
    blocks = [block.module for block in decoder_blocks(model, facts)]
    lines = []
    for entry in mappings:
        reasons = Counter(reason for block in blocks if (reason := _reason(entry, block, facts, heads)) is not None)
        subject = f"no scale is moved from '{entry.mapping.smooth_layer}' to {', '.join(entry.mapping.balance_layers)}"
        lines += [f"{subject} in {_how_many(count, len(blocks))}: {reason}" for reason, count in reasons.items()]
    return tuple(lines)


def _reason(entry: UserMapping, block: nn.Module, facts: Architecture, heads: int) -> str | None:
    """Return why a mapping does not apply to a block; None if it does."""
    resolved = [resolve(mapping, block, facts, heads) for mapping in entry.mappings_in(block)]
    reason = next((one for one in resolved if isinstance(one, str)), None)
    if reason is None and entry.condition is not None and not entry.condition.holds(block):
        return "its condition does not hold"
    return reason


def _how_many(count: int, blocks: int) -> str:
    return "every block" if count == blocks else f"{count} of {blocks} blocks"
