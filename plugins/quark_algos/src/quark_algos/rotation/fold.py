"""Folding rotations into weights: R1 into all that writes to the residual stream or reads it, R2 into attention's values and its output.

With the stream ``x`` rotated to ``x · R``, writers put out ``y · R``, and readers have ``W · diag(γ) · R``, the weight γ of their norm
folded in, so that the norm commutes with R. Parameters are made anew and never written: they may be mapped from a checkpoint, or be another
module's too. Each is computed in float32, or float64 where it is that, and rounded once to its dtype.

Where norms subtract the mean, R must keep it (`Rotation.keeps_mean`): so the model keeps its LayerNorms, and any runtime can load it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quark.config.architecture import Architecture
from quark.errors import ConfigError, UnsupportedError
from quark_algos.mappings.mapping import mappings_of
from quark_algos.mappings.resolve import ResolvedMapping, input_axis, resolve
from quark_algos.rotation.hadamard import Rotation
from quark_algos.rotation.residual_stream import Reading, Stream, in_block, matching, outside_blocks

__all__ = ["block", "fuse_norms", "outside", "r1_of", "untie", "values"]


def r1_of(width: int, facts: Architecture, size: int | None = None, seed: int | None = None) -> Rotation:
    """A rotation that the family's residual stream can take.

    Args:
        width: Of the stream, above 0.
        facts: About the family; whether its norms subtract the mean.
        size: As in `Rotation.of`.
        seed: Likewise.
    """
    return Rotation.of(width, size, seed, keeps_mean=facts.norm_subtracts_mean)


@torch.no_grad()
def outside(model: nn.Module, facts: Architecture, rotation: Rotation | None, stream: Stream | None = None) -> None:
    """Fold R1 into embeddings, positions and the head, and the final norm into the head, which is untied from the embeddings.

    Args:
        model: A model of transformers, or one built alike. What is in its blocks is not touched, and may be on the meta device.
        facts: About its family.
        rotation: Of the width of the stream, by `r1_of`; None only folds the norm.
        stream: What touches the stream there, where facts are not to say it.

    Raises:
        UnsupportedError: The family, or this variant, cannot be rotated.
        ConfigError: The rotation has another width, or does not keep the mean though norms subtract it.
    """
    _fold(stream or outside_blocks(model, facts), facts, rotation)
    untie(model)


@torch.no_grad()
def block(module: nn.Module, facts: Architecture, rotation: Rotation | None, stream: Stream | None = None) -> None:
    """Fold R1 and the norms into one decoder block; it computes for ``x · R`` what it did for ``x``, times R.

    Args:
        module: The block. Its experts must be separate layers.
        facts: About its family.
        rotation: As for `outside`, the same one; None only folds the norms.
        stream: As for `outside`.

    Raises:
        UnsupportedError: The family, or this block, cannot be rotated.
        ConfigError: As for `outside`.
    """
    _fold(stream or in_block(module, facts), facts, rotation)


def fuse_norms(module: nn.Module, facts: Architecture) -> None:
    """Fold the weights of a block's norms into their readers, and leave ones, or zeros with a unit offset; see `block`."""
    block(module, facts, None)


@torch.no_grad()
def values(module: nn.Module, facts: Architecture, rotation: Rotation, heads: int) -> str | None:
    """Fold R2 into one block: every head's values are rotated, and the columns of attention's output with them.

    That is right where values reach the output as sums over tokens only. Gates that multiply single channels on the way are told by queries
    that are wider than the output's input, since they come with those (Qwen3-Next); others would have to be known by facts.

    Args:
        module: The block.
        facts: About its family.
        rotation: Of the width of one head.
        heads: Of queries; with grouped-query attention several share the values of one.

    Returns:
        None where it is done; else why it cannot be, nothing being changed.

    Raises:
        ConfigError: The rotation is not of the width of a head.
    """
    (site,) = [s for s in mappings_of(facts) if s.kind == "value"] or (None,)
    if site is None:
        return "the facts name no projection of values that reach attention's output linearly"
    found = resolve(site, module, facts, heads)
    if isinstance(found, str):
        return found
    (modules,) = found
    if gated := _gated(module, facts, modules.channels.columns):
        return gated
    width = modules.channels.columns // heads
    if width != rotation.width:
        raise ConfigError(f"{modules.name}: heads of {width} channels, and a rotation of width {rotation.width}; make one for the head")
    for reader in modules.readers.values():
        by_head = _in_columns(reader, reader.get_parameter("weight")).unflatten(-1, (heads, width))
        _replace(reader, "weight", _in_columns(reader, rotation.apply(_master(by_head)).flatten(-2)))
    for name in _own(modules.prev, ("weight", "bias")):
        _replace(modules.prev, name, _rotated_values(modules, name, rotation))
    return None


def _gated(module: nn.Module, facts: Architecture, columns: int) -> str | None:
    """Why values cannot be rotated, where a projection beside that of the values puts out more than all heads take."""
    if facts.attention_value_rows != "all" or facts.attention_value not in facts.attention_inputs:
        return None
    for name, projection in matching(module, facts.attention_inputs).items():
        outputs = projection.get_parameter("weight").shape[1 - input_axis(projection)]
        if outputs > columns:
            return f"{name} has {outputs} outputs for {columns} channels of the heads, so gates may multiply single channels of the values"
    return None


def untie(model: nn.Module) -> bool:
    """Say in a model's configuration that its head and embeddings have weights of their own; returns whether that is new."""
    config: Any = getattr(model, "config", None)
    configs = [config, config.get_text_config()] if hasattr(config, "get_text_config") else [config]
    tied = [one for one in configs if getattr(one, "tie_word_embeddings", False)]
    for one in tied:
        one.tie_word_embeddings = False
    return bool(tied)


def _fold(stream: Stream, facts: Architecture, rotation: Rotation | None) -> None:
    if rotation is not None:
        _see_fit(stream, facts, rotation)
    biased = [_takes_norm_bias(reading, facts) for reading in stream.readings]
    for reading, into_readers in zip(stream.readings, biased, strict=True):
        _fold_norm(reading, facts, rotation, into_readers=into_readers)
    if rotation is None:
        return
    for module in stream.writers.values():
        weight = _master(module.get_parameter("weight"))
        _replace(module, "weight", rotation.apply(weight) if _puts_out_columns(module) else rotation.apply(weight.t()).t())
        for name in _own(module, ("bias",)):
            _replace(module, name, rotation.apply(_master(module.get_parameter(name))))


def _fold_norm(reading: Reading, facts: Architecture, rotation: Rotation | None, *, into_readers: bool) -> None:
    """Weight and bias of a norm go into the readers; a bias they cannot take stays with the norm, as what it is without a weight."""
    norm, offset = reading.norm, 1.0 if facts.norm_has_unit_offset else 0.0
    has_weight = bool(_own(norm, ("weight",)))
    gamma = _master(norm.get_parameter("weight")) + offset if has_weight else None
    beta = _master(norm.get_parameter("bias")) if _own(norm, ("bias",)) else None
    for reader in reading.readers.values():
        read = _in_columns(reader, _master(reader.get_parameter("weight")))
        if beta is not None and into_readers:
            bias = _master(reader.get_parameter("bias"))
            _replace(reader, "bias", bias + read @ beta.to(device=read.device, dtype=read.dtype))
        if gamma is not None:
            read = read * gamma.to(read.device)
        _replace(reader, "weight", _in_columns(reader, read if rotation is None else rotation.apply(read)))
    if beta is not None:
        kept = torch.zeros_like(beta) if into_readers else beta if gamma is None else torch.where(beta == 0, beta, beta / gamma)
        _replace(norm, "bias", kept if rotation is None else rotation.apply(kept))
    if gamma is not None:
        _replace(norm, "weight", torch.full_like(gamma, 1.0 - offset))


def _takes_norm_bias(reading: Reading, facts: Architecture) -> bool:
    """Whether all readers can take a norm's bias. If not it stays with the norm, divided by the weight, which must be possible."""
    if all(_own(reader, ("bias",)) for reader in reading.readers.values()):
        return True
    if _own(reading.norm, ("weight", "bias")) == ("weight", "bias"):
        gamma = reading.norm.get_parameter("weight") + (1.0 if facts.norm_has_unit_offset else 0.0)
        if bool(((gamma == 0) & (reading.norm.get_parameter("bias") != 0)).any()):
            where = f"{reading.name}: a channel has a bias and the weight 0, and not all its readers have biases"
            raise UnsupportedError(f"{where}; so the weight cannot be folded, leave rotation out")
    return False


def _see_fit(stream: Stream, facts: Architecture, rotation: Rotation) -> None:
    if facts.norm_subtracts_mean and not rotation.keeps_mean:
        raise ConfigError(f"the norms of {facts.model_type} subtract the mean, and this rotation does not keep it; make one by r1_of()")
    for name, module in stream.writers.items():
        _see_width(name, module.get_parameter("weight").shape[1 if _puts_out_columns(module) else 0], rotation)
    for reading in stream.readings:
        for name, module in reading.readers.items():
            _see_width(name, module.get_parameter("weight").shape[input_axis(module)], rotation)


def _see_width(name: str, width: int, rotation: Rotation) -> None:
    if width != rotation.width:
        raise ConfigError(f"{name} has {width} channels of the residual stream, and the rotation {rotation.width}; make one of that width")


def _rotated_values(modules: ResolvedMapping, name: str, rotation: Rotation) -> Tensor:
    """Weight or bias of what puts values out, ``[…, outputs]`` turned so that outputs come last, rotated, and turned back."""
    prev = modules.prev
    old = _master(prev.get_parameter(name))
    turned = old.ndim == 2 and not _puts_out_columns(prev)
    held = old.t() if turned else old
    rows = torch.arange(held.shape[-1]) if modules.rows is None else modules.rows
    rows = rows.to(held.device)
    new = held.clone()
    new[..., rows] = rotation.apply(held[..., rows].unflatten(-1, (-1, rotation.width))).flatten(-2)
    return new.t() if turned else new


def _puts_out_columns(module: nn.Module) -> bool:
    """Whether the last axis of the weight is what the module puts out: embeddings, and layers that keep it transposed."""
    return isinstance(module, nn.Embedding) or input_axis(module) == 0


def _in_columns(module: nn.Module, weight: Tensor) -> Tensor:
    """With the input channels last; its own inverse."""
    return weight if input_axis(module) == 1 else weight.t()


def _own(module: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if isinstance(getattr(module, name, None), nn.Parameter))


def _master(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64 if tensor.dtype is torch.float64 else torch.float32)


def _replace(module: nn.Module, name: str, value: Tensor) -> None:
    old = module.get_parameter(name)
    setattr(module, name, nn.Parameter(value.to(old.dtype).contiguous(), requires_grad=old.requires_grad))
