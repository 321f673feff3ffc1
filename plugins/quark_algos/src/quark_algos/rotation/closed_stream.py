"""Whether a residual stream that was written by hand is closed: of all that is known to touch it, nothing is left out or misplaced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from torch import nn

from quark.config.architecture import Architecture
from quark.errors import ConfigError, UnsupportedError
from quark.names import folded
from quark_algos.mappings.mapping import linear_layers, writers_of_attention, writers_of_mlp
from quark_algos.mappings.resolve import input_axis, submodule
from quark_algos.rotation.config import RotationConfig
from quark_algos.rotation.residual_stream import Stream, matching, norms_and_readers, see_single_experts

__all__ = ["known_in_full", "see_closed", "see_shapes"]

_STREAM = ("decoder_blocks", "embeddings", "final_norm", "head", "attention_norm", "mlp_norm", "attention_inputs")
_AS_KNOWN = "Leave scaling_layers empty to have what the model's family has"


def known_in_full(facts: Architecture) -> bool:
    """Whether facts name all that touches the residual stream of a family.

    Raises:
        UnsupportedError: The family cannot be rotated, whatever is written by hand.
    """
    named = {name: getattr(facts, name) for name in _STREAM}
    supposed: dict[str, Any] = {name: value or "?" for name, value in named.items()}
    reason = facts.unsupported.get("rotation") or RotationConfig.refusal(attrs.evolve(facts, **supposed))
    if reason is not None:
        raise UnsupportedError(f"{facts.model_type} cannot be rotated: {reason}; leave rotation out of the algorithms")
    return all(named.values())


def see_shapes(streams: Mapping[str, Stream], width: int) -> None:
    """See that every place has writers and readers, and that all are matrices of the stream's width.

    Args:
        streams: By full name of a block; ``""`` is what lies outside.
        width: Of the residual stream.

    Raises:
        ConfigError: One is not.
    """
    for place, stream in streams.items():
        if not stream.writers or not stream.readings:
            lacks, where = "writes to" if not stream.writers else "reads", f"in {place}" if place else "outside the blocks"
            raise ConfigError(
                f"rotation: by its scaling_layers nothing {lacks} the residual stream {where}, so they cannot be complete. {_AS_KNOWN}"
            )
        readers = {name: module for reading in stream.readings for name, module in reading.readers.items()}
        for names, is_writer in ((stream.writers, True), (readers, False)):
            for name, module in names.items():
                _see_width(f"{place}.{name}".lstrip("."), module, width, is_writer=is_writer)


def see_closed(model: nn.Module, facts: Architecture, streams: Mapping[str, Stream]) -> None:
    """See that all is there that facts know to touch the stream, in the part it has.

    Args:
        model: The whole model.
        facts: About its family, `known_in_full`.
        streams: By full name of a block; ``""`` is what lies outside.

    Raises:
        ConfigError: Something is left out, is read through another norm than it is, or does not touch the stream at all.
        UnsupportedError: There are fused experts.
    """
    outside = (*facts.embeddings, *([facts.position_embeddings] if facts.position_embeddings else []), *facts.inserted_embeddings)
    left_out: list[str] = []
    for place, stream in streams.items():
        module = model.get_submodule(place)
        if place:
            see_single_experts(module, facts, stream.writers)
            writers = (*writers_of_attention(facts), *writers_of_mlp(facts))
            norms = norms_and_readers(facts)
        else:
            writers, norms = outside, {facts.final_norm or "": (facts.head or "",)}
        known_writers = matching(module, writers)
        known = {norm: matching(module, readers) for norm, readers in norms.items()}
        left_out += [f"{place}.{name}".lstrip(".") for name in _missing(stream, known_writers, known)]
        _see_parts(place, module, facts, stream, (known_writers, known))
    if left_out:
        raise ConfigError(
            f"rotation: scaling_layers leave out {folded(left_out)}, which also write to the residual stream or read it; "
            f"so the rotated model would compute something else. {_AS_KNOWN}"
        )


def _missing(stream: Stream, writers: Mapping[str, nn.Module], known: Mapping[str, Mapping[str, nn.Module]]) -> Iterator[str]:
    written, read = set(stream.writers.values()), {m for r in stream.readings for m in r.readers.values()}
    yield from (name for name, module in writers.items() if module not in written)
    yield from (name for readers in known.values() for name, module in readers.items() if module not in read)


def _see_parts(
    place: str,
    module: nn.Module,
    facts: Architecture,
    stream: Stream,
    parts: tuple[Mapping[str, nn.Module], Mapping[str, Mapping[str, nn.Module]]],
) -> None:
    """See that no module has a part in the stream that facts know to be another, or none."""
    known_writers, known = parts
    writers = set(known_writers.values())
    norm_of = {reader: norm for norm, readers in known.items() for reader in readers.values()}
    others = set(matching(module, linear_layers(facts)).values()) if place else set()
    for name, writer in stream.writers.items():
        if writer not in writers and (writer in others or writer in norm_of):
            raise ConfigError(f"rotation: '{place}.{name}' of 'prev_modules' does not write to the residual stream. {_AS_KNOWN}")
    for reading in stream.readings:
        for name, reader in reading.readers.items():
            full, norm = f"{place}.{name}".lstrip("."), norm_of.get(reader)
            if norm is None and (reader in others or reader in writers):
                raise ConfigError(f"rotation: '{full}' of 'next_modules' does not read the residual stream. {_AS_KNOWN}")
            # Where this model lacks that norm, it is a variant, in which another has its place.
            actual = None if norm is None else submodule(module, norm)
            if actual is not None and actual is not reading.norm:
                raise ConfigError(f"rotation: '{full}' reads the residual stream through '{norm}', not '{reading.name}'. {_AS_KNOWN}")


def _see_width(name: str, module: nn.Module, width: int, *, is_writer: bool) -> None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 2:
        raise ConfigError(f"rotation: '{name}' ({type(module).__name__}) is no layer with one matrix, so no rotation can be folded into it")
    axis = 1 if isinstance(module, nn.Embedding) else 1 - input_axis(module) if is_writer else input_axis(module)
    if weight.shape[axis] != width:
        side = "outputs" if is_writer else "inputs"
        raise ConfigError(f"rotation: '{name}' has {weight.shape[axis]} {side}, and the residual stream {width} channels. {_AS_KNOWN}")
