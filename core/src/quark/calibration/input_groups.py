"""Input groups: groups of layers of a block that read the same tensor, such as q, k and v projections.

The groups are predicted before a run and observed during the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs
from torch import Tensor

from quark.base.ranks import ALONE, Ranks
from quark.calibration.forwards import Forward
from quark.config.architecture import Architecture


@attrs.frozen(eq=False)
class _Last:
    """The input tensors that were observed last.

    Attributes:
        leader: Leader of the group whose layers read the tensors.
        layers: Layers that read the tensors.
        inputs: The tensor of each forward pass.
        spec: How the layers quantize the tensors.
    """

    leader: str
    layers: tuple[str, ...]
    inputs: Mapping[Forward, Tensor]
    spec: object


class InputGroups:
    """Finds the layers of a block that read the same tensor, so that statistics of this tensor are collected
    once.

    A layer joins the group of the layer that was observed just before it if both are called with the same
    tensor objects. So the layers of a group must be called one after another. The first layer of a group is
    its leader. Names of layers are relative to the block.

    Args:
        architecture: Facts about the model family, or None if the family is not known.
        siblings: Groups of name suffixes, such as ``(("q_proj", "k_proj", "v_proj"), …)``. Layers read the
            same tensor if they have the same parent and their suffixes are in the same group.

    Attributes:
        siblings: The argument ``siblings``. The layers of such a group also share a scale, so they are
            rounded together.
    """

    def __init__(self, architecture: Architecture | None = None, siblings: Iterable[Sequence[str]] = ()) -> None:
        self._architecture = architecture
        self.siblings = tuple(siblings)
        self._learned: list[set[str]] = []
        self._leaders: dict[str, str] = {}
        self._last: _Last | None = None

    def expected(self, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Return a dictionary from each layer that shares its input to all layers of its group.

        The group includes the layer itself. Groups follow from the architecture and from earlier blocks.

        Args:
            names: Layers of one block. A layer that shares its input with no other layer is not in the
                result.
        """
        groups: dict[str, tuple[str, ...]] = {}
        for stated in self._stated(names):
            joined = set(stated).union(*(groups.get(name, ()) for name in stated))
            if len(joined) > 1:
                members = tuple(name for name in names if name in joined)
                groups |= dict.fromkeys(members, members)
        for learned in self._learned:
            members = tuple(n for n in names if n in learned)
            groups |= dict.fromkeys(members, members)
        return groups

    def observe(self, inputs: Mapping[Forward, Tensor], *layers: str, spec: object = None, ranks: Ranks = ALONE) -> tuple[str, bool]:
        """Return the leader of the group of ``layers``, and whether the group reads ``inputs`` for the first
        time.

        Args:
            inputs: The tensor that the layers are about to read, for each forward pass. The dictionary has
                the running forward pass, or all forward passes that wait at the layers.
            layers: The layers. The first one determines the group. A layer that was observed before in this
                block stays in its group.
            spec: How the layers quantize their input. Layers with different specs are in different groups.
            ranks: The ranks that observe the same layers now, each with its own forward passes. Layers are in
                one group only if they read the same tensors on every rank.
        """
        last = self._last
        is_same = last is not None and last.spec == spec and ranks.all(_are_same(last.inputs, inputs))
        leader = self._leaders.setdefault(layers[0], last.leader if last is not None and is_same else layers[0])
        is_new = last is None or not is_same or leader != last.leader
        if last is not None and not is_new:
            self._learn({*last.layers, *layers})
        self._last = _Last(leader, layers, inputs, spec)
        return leader, is_new

    def end_block(self) -> None:
        """Delete the stored tensors and leaders of a block.

        The observed groups are kept, because `expected` uses them for later blocks.
        """
        self._leaders.clear()
        self._last = None

    def learned(self) -> list[list[str]]:
        """Return the observed groups as lists of names, which can be stored as JSON."""
        return [sorted(group) for group in self._learned]

    def recall(self, learned: Iterable[Iterable[str]]) -> None:
        """Restore the groups that `learned` returned in another process."""
        self._learned = [set(group) for group in learned]

    def _learn(self, names: set[str]) -> None:
        joined = names.union(*(group for group in self._learned if group & names))
        self._learned = [*(group for group in self._learned if not group & joined), joined]

    def _stated(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Yield the groups that follow from the architecture and from ``siblings``."""
        known, architecture = set(names), self._architecture
        if architecture is not None:
            parts = [architecture.attention_inputs, architecture.mlp_inputs]
            if architecture.attention_norm is not None and architecture.attention_norm == architecture.mlp_norm:
                parts = [(*architecture.attention_inputs, *architecture.mlp_inputs)]
            yield from ([name for name in part if name in known] for part in parts)
        for suffixes in (*self.siblings, *(architecture.fused if architecture else ())):
            for name in names:
                parent, dot, last = name.rpartition(".")
                if last == suffixes[0]:
                    yield [n for n in (f"{parent}{dot}{s}" for s in suffixes) if n in known]


def _are_same(one: Mapping[Forward, Tensor], other: Mapping[Forward, Tensor]) -> bool:
    """Return whether both mappings have the same forward passes, each with the same tensor object."""
    return one.keys() == other.keys() and all(one[forward] is x for forward, x in other.items())


def common_groups(leader_of: Mapping[str, str], names: Sequence[str], ranks: Ranks) -> list[tuple[list[str], str | None]]:
    """Return groups of layers. Layers are in one group if they share their input on any rank.

    Each group is returned with the name of its leader on this rank. The leader is None if no token of this
    rank has reached a layer of the group.

    Args:
        leader_of: A mapping from each layer that a token of this rank has reached to the leader of its group.
            The layers of a group share the leader's statistics.
        names: All layers, in the same order on all ranks. A layer that no token of any rank has reached is in
            no group.
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
