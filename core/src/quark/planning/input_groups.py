"""Which layers of a block are said to read the same tensor: by a family's facts, by their names. Runs verify it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from quark.config.architecture import Architecture


def shared_inputs(
    names: Sequence[str], architecture: Architecture | None, siblings: Iterable[Sequence[str]] = ()
) -> dict[str, tuple[str, ...]]:
    """The layers that read what a layer reads, itself among them, for each that shares its input.

    Args:
        names: Of layers, relative to one block.
        architecture: Facts about the family, None where it is not known.
        siblings: Suffixes of layers which, where they have one parent, read the same: ``(("q_proj", "k_proj", "v_proj"), …)``.
    """
    found: dict[str, tuple[str, ...]] = {}
    for group in _said(names, architecture, siblings):
        joined = set(group).union(*(found.get(name, ()) for name in group))
        if len(joined) > 1:
            members = tuple(name for name in names if name in joined)
            found |= dict.fromkeys(members, members)
    return found


def _said(names: Sequence[str], architecture: Architecture | None, siblings: Iterable[Sequence[str]]) -> Iterator[list[str]]:
    known = set(names)
    if architecture is not None:
        parts = [architecture.attention_inputs, architecture.mlp_inputs]
        if architecture.attention_norm is not None and architecture.attention_norm == architecture.mlp_norm:
            parts = [(*architecture.attention_inputs, *architecture.mlp_inputs)]
        yield from ([name for name in part if name in known] for part in parts)
    for suffixes in (*siblings, *(architecture.fused if architecture else ())):
        for name in names:
            parent, dot, last = name.rpartition(".")
            if last == suffixes[0]:
                yield [n for n in (f"{parent}{dot}{s}" for s in suffixes) if n in known]
