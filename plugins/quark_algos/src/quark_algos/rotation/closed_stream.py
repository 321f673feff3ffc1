"""Checks that a user stream is closed.

It names all modules that touch the residual stream, each with its own norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from torch import nn

from quark.base.names import folded
from quark.config.architecture import Architecture
from quark.errors import ConfigError
from quark_algos.mappings.mapping import linear_layers, writers_before_blocks, writers_of_attention, writers_of_mlp
from quark_algos.mappings.resolve import input_axis, submodule
from quark_algos.rotation.residual_stream import Stream, check, matching, norms_and_readers, see_single_experts

__all__ = ["known_in_full", "see_closed", "see_shapes"]

_STREAM = ("decoder_blocks", "embeddings", "final_norm", "head", "attention_norm", "mlp_norm", "attention_inputs")
_Layers = Mapping[str, nn.Module]
_AS_KNOWN = "Leave scaling_layers empty to use those of the model's architecture"


def known_in_full(facts: Architecture) -> bool:
    """Return whether the architecture names all modules that touch the residual stream.

    Raises:
        UnsupportedError: The architecture cannot be rotated, whatever ``scaling_layers`` say.
    """
    named = {name: getattr(facts, name) for name in _STREAM}
    supposed: dict[str, Any] = {name: value or "?" for name, value in named.items()}
    check(attrs.evolve(facts, **supposed))
    return all(named.values())


def see_shapes(streams: Mapping[str, Stream], width: int) -> None:
    """Check that each block has writers and readers, and that all are matrices of the stream's width.

    Args:
        streams: Streams by full name of a block; ``""`` for the modules outside the blocks.
        width: Channels of the residual stream.

    Raises:
        ConfigError: A block has no writer or no reader, or a module is no matrix of that width.
    """
    for block, stream in streams.items():
        if not stream.writers or not stream.readings:
            verb, where = "writes to" if not stream.writers else "reads", f"in {block}" if block else "outside the blocks"
            raise ConfigError(
                f"rotation: by its scaling_layers nothing {verb} the residual stream {where}, so they cannot be complete. {_AS_KNOWN}"
            )
        readers = {name: module for reading in stream.readings for name, module in reading.readers.items()}
        for names, is_writer in ((stream.writers, True), (readers, False)):
            for name, module in names.items():
                _see_width(_full(block, name), module, width, is_writer=is_writer)


def see_closed(model: nn.Module, facts: Architecture, streams: Mapping[str, Stream]) -> None:
    """Check that the streams name all modules that touch the residual stream.

    They are writers or readers as the architecture has them.

    Args:
        model: The whole model.
        facts: Its architecture, `known_in_full`.
        streams: Streams by full name of a block; ``""`` for the modules outside the blocks.

    Raises:
        ConfigError: A module is missing, is listed with another norm, or does not touch the stream.
        UnsupportedError: A block has fused experts.
    """
    left_out: list[str] = []
    for block, stream in streams.items():
        module = model.get_submodule(block)
        if block:
            see_single_experts(module, facts, stream.writers)
            writer_names, reader_names = (*writers_of_attention(facts), *writers_of_mlp(facts)), norms_and_readers(facts)
        else:
            writer_names, reader_names = writers_before_blocks(facts), {facts.final_norm or "": (facts.head or "",)}
        writers = matching(module, writer_names)
        readers = {norm: matching(module, names) for norm, names in reader_names.items()}
        _see_parts(block, module, facts, stream, writers, readers)
        written, read = set(stream.writers.values()), {m for reading in stream.readings for m in reading.readers.values()}
        left_out += [_full(block, name) for name, writer in writers.items() if writer not in written]
        left_out += [_full(block, name) for layers in readers.values() for name, reader in layers.items() if reader not in read]
    if left_out:
        raise ConfigError(
            f"rotation: scaling_layers leave out {folded(left_out)}, which also write to the residual stream or read it; "
            f"so the rotated model would compute another function. {_AS_KNOWN}"
        )


def _see_parts(
    block: str, module: nn.Module, facts: Architecture, stream: Stream, known_writers: _Layers, known_readers: Mapping[str, _Layers]
) -> None:
    """Check that each named module touches the stream as the architecture says.

    It writes to the stream, or reads it through its norm.
    """
    writers = set(known_writers.values())
    norm_of = {reader: norm for norm, layers in known_readers.items() for reader in layers.values()}
    others = set(matching(module, linear_layers(facts)).values()) if block else set()
    for name, writer in stream.writers.items():
        if writer not in writers and (writer in others or writer in norm_of):
            raise ConfigError(f"rotation: '{block}.{name}' of 'prev_modules' does not write to the residual stream. {_AS_KNOWN}")
    for reading in stream.readings:
        for name, reader in reading.readers.items():
            norm = norm_of.get(reader)
            if norm is None and (reader in others or reader in writers):
                raise ConfigError(f"rotation: '{_full(block, name)}' of 'next_modules' does not read the residual stream. {_AS_KNOWN}")
            # A model without that norm is a variant in which another norm replaces it.
            actual = None if norm is None else submodule(module, norm)
            if actual is not None and actual is not reading.norm:
                raise ConfigError(
                    f"rotation: '{_full(block, name)}' reads the residual stream through '{norm}', not '{reading.name}'. {_AS_KNOWN}"
                )


def _full(block: str, name: str) -> str:
    return f"{block}.{name}".lstrip(".")


def _see_width(name: str, module: nn.Module, width: int, *, is_writer: bool) -> None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 2:
        raise ConfigError(f"rotation: '{name}' ({type(module).__name__}) is no layer with one matrix, so no rotation can be folded into it")
    axis = 1 if isinstance(module, nn.Embedding) else 1 - input_axis(module) if is_writer else input_axis(module)
    if weight.shape[axis] != width:
        side = "outputs" if is_writer else "inputs"
        raise ConfigError(f"rotation: '{name}' has {weight.shape[axis]} {side}, and the residual stream {width} channels. {_AS_KNOWN}")
