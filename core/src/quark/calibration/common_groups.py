"""Input groups that all ranks agree on: a rank knows those of the layers that its own tokens have reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quark.ranks import Ranks

__all__ = ["common_groups"]


def common_groups(leader_of: Mapping[str, str], names: Sequence[str], ranks: Ranks) -> list[tuple[list[str], str | None]]:
    """Return groups of layers that share their input on any rank, each with its leader on this rank; None where the rank knows none.

    Args:
        leader_of: On this rank, of each layer that a token has reached, the layer whose statistics it shares.
        names: All layers, in the same order on all ranks. Those that no token of any rank has reached are in no group.
        ranks: The ranks.
    """
    everywhere = ranks.gather(dict(leader_of))
    groups: list[tuple[list[str], set[tuple[int, str]]]] = []
    for name in names:
        leaders = {(rank, each[name]) for rank, each in enumerate(everywhere) if name in each}
        group = next((group for group in groups if group[1] & leaders), None)
        if group is not None:
            group[0].append(name)
            group[1].update(leaders)
        elif leaders:
            groups.append(([name], leaders))
    return [(members, next((leader_of[name] for name in members if name in leader_of), None)) for members, _ in groups]
