"""Sites at which no scale can be moved, told of before any work: one line for each and each reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from quark.config.architecture import Architecture
from quark.planning.decoder_blocks import decoder_blocks
from quark_algos.mappings.resolve import resolve
from quark_algos.mappings.user_mappings import Place

__all__ = ["left_out"]


def left_out(places: Sequence[Place], model: nn.Module, facts: Architecture, heads: int) -> tuple[str, ...]:
    """Lines for the plan.

    Args:
        places: That are asked for.
        model: The whole model; meta tensors will do.
        facts: About its family.
        heads: Of queries in its attention.
    """
    blocks = [block.module for block in decoder_blocks(model, facts)]
    lines = []
    for place in places:
        reasons = Counter(reason for block in blocks if (reason := _reason(place, block, facts, heads)) is not None)
        named = f"no scale is moved from '{place.site.prev}' to {', '.join(place.site.layers)}"
        lines += [f"{named} in {_share(count, len(blocks))}: {reason}" for reason, count in reasons.items()]
    return tuple(lines)


def _reason(place: Place, block: nn.Module, facts: Architecture, heads: int) -> str | None:
    """Why a place does not hold in a block; None where it does."""
    found = [resolve(site, block, facts, heads) for site in place.sites(block)]
    reason = next((one for one in found if isinstance(one, str)), None)
    if reason is None and place.condition is not None and not place.condition.holds(block):
        return "its condition does not hold"
    return reason


def _share(count: int, blocks: int) -> str:
    return "every block" if count == blocks else f"{count} of {blocks} blocks"
