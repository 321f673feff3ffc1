"""Functions that fold rotations into weights.

R1 is folded into all layers that read or write the residual stream. R2 is folded into the value projection
and the output projection of attention.

A rotation R replaces the stream ``x`` by ``x · R``. A layer whose output y is added to the stream (a writer)
then returns ``y · R``. A layer that reads the stream (a reader) gets the weight ``W · diag(γ) · R``. γ is the
weight of the norm in front of the reader. γ is folded into the reader, because a norm with a weight would not
commute with R. Parameters are replaced by new parameters and are never changed in place, because a parameter
may be memory-mapped from a checkpoint or shared with another module. New parameters are computed in float32
(or in float64 if the old parameters are float64) and rounded once.

If norms subtract the mean, R must preserve the mean (`Rotation.keeps_mean`). Then the LayerNorms of the model
do not have to be replaced, and any runtime can load the model. Sources: QuaRot, arXiv 2404.00456; SpinQuant,
arXiv 2405.16406.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quark.config.architecture import Architecture
from quark.errors import ConfigError, UnsupportedError
from quark.models.plan.family import text_config
from quark_algos.mappings.mapping import mappings_of
from quark_algos.mappings.resolve import ResolvedMapping, input_axis, resolve, submodule
from quark_algos.rotation.config import RotationConfig
from quark_algos.rotation.hadamard import Rotation
from quark_algos.rotation.residual_stream import Reading, Stream, matching

__all__ = ["fold_r1", "fold_r2", "r1_of", "untie"]


def r1_of(width: int, facts: Architecture, size: int | None = None, seed: int | None = None) -> Rotation:
    """Return a rotation of the residual stream. If the norms subtract the mean, the rotation preserves the
    mean.

    Args:
        width: Number of channels of the stream, above 0.
        facts: Architecture of the model. It states whether the norms subtract the mean.
        size: As in `Rotation.of`.
        seed: As in `Rotation.of`.
    """
    return Rotation.of(width, size, seed, keeps_mean=facts.norm_subtracts_mean)


@torch.no_grad()
def fold_r1(stream: Stream, facts: Architecture, rotation: Rotation) -> None:
    """Fold R1 and the weights of norms into the writers and readers of one decoder block, or of the modules
    outside the blocks.

    If the block returned y for the input x, it afterwards returns ``y · R`` for the input ``x · R``.

    Args:
        stream: The writers and readers. Experts must be separate layers.
        facts: Architecture of the model.
        rotation: The rotation of the stream, from `r1_of`. It must be the same for the whole model.

    Raises:
        UnsupportedError: A norm has a bias that can neither be folded into the readers of the norm nor remain
            in the norm.
        ConfigError: The rotation has another width, or it does not preserve the mean although norms subtract
            the mean.
    """
    _see_fit(stream, facts, rotation)
    biased = [_takes_norm_bias(reading, facts) for reading in stream.readings]
    for reading, into_readers in zip(stream.readings, biased, strict=True):
        _fold_norm(reading, facts, rotation, into_readers=into_readers)
    for module in stream.writers.values():
        weight = _master(module.get_parameter("weight"))
        _replace(module, "weight", rotation.apply(weight) if _has_outputs_last(module) else rotation.apply(weight.t()).t())
        for name in _own(module, ("bias",)):
            _replace(module, name, rotation.apply(_master(module.get_parameter(name))))


@torch.no_grad()
def fold_r2(module: nn.Module, facts: Architecture, heads: int, seed: int | None = None) -> str | None:
    """Fold R2 into one block. It rotates the values of each head and the inputs of the output projection of
    attention.

    The block's output does not change if the inputs of the output projection are weighted sums of values over
    tokens, without any further operation. Some models, such as Qwen3-Next, multiply single channels of these
    inputs by a gate. Such a gate is detected if the query projection has more outputs than the output
    projection has inputs. For other gates, the architecture must declare that R2 is unsupported.

    Args:
        module: The block.
        facts: Architecture of the model.
        heads: Number of query heads. With grouped-query attention, several query heads share the values of
            one key-value head.
        seed: As in `Rotation.of`.

    Returns: None if R2 was folded. If R2 cannot be folded, the block is not changed, and the result is the
    reason.
    """
    if refused := RotationConfig.r2_refusal(facts):
        return refused
    if submodule(module, facts.attention_output or "") is None:
        return "the block has no attention"
    mapping = next(m for m in mappings_of(facts) if m.kind == "value")
    resolved = resolve(mapping, module, facts, heads)
    if isinstance(resolved, str):
        return resolved
    (modules,) = resolved
    if gated := _gated(module, facts, modules.channels.columns):
        return gated
    rotation = Rotation.of(modules.channels.columns // heads, seed=seed)
    for layer in modules.balance_layers.values():
        by_head = _in_columns(layer, layer.get_parameter("weight")).unflatten(-1, (heads, rotation.width))
        _replace(layer, "weight", _in_columns(layer, rotation.apply(_master(by_head)).flatten(-2)))
    for name in _own(modules.smooth_layer, ("weight", "bias")):
        _replace(modules.smooth_layer, name, _rotated_values(modules, name, rotation))
    return None


def _gated(module: nn.Module, facts: Architecture, columns: int) -> str | None:
    """Return a reason if values cannot be rotated because the block may have gates. Otherwise return None.

    A block may have gates if an input projection has more outputs than the heads have channels.
    """
    if facts.attention_value_rows != "all" or facts.attention_value not in facts.attention_inputs:
        return None
    for name, projection in matching(module, facts.attention_inputs).items():
        outputs = projection.get_parameter("weight").shape[1 - input_axis(projection)]
        if outputs > columns:
            return f"{name} has {outputs} outputs for {columns} channels of the heads, so gates may scale single channels of the values"
    return None


def untie(model: nn.Module) -> None:
    """Set ``tie_word_embeddings`` to False in the configuration of a model and in the configuration of the
    text part of the model.
    """
    for config in filter(None, (getattr(model, "config", None), text_config(model))):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False


def _fold_norm(reading: Reading, facts: Architecture, rotation: Rotation, *, into_readers: bool) -> None:
    """Fold the weight and the bias of a norm into the readers of the norm, together with the rotation.

    If ``into_readers`` is False, the bias is not folded: it remains in the norm and is divided by the norm's
    weight.
    """
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
        _replace(reader, "weight", _in_columns(reader, rotation.apply(read)))
    if beta is not None:
        bias = torch.zeros_like(beta) if into_readers else beta if gamma is None else torch.where(beta == 0, beta, beta / gamma)
        _replace(norm, "bias", rotation.apply(bias))
    if gamma is not None:
        _replace(norm, "weight", torch.full_like(gamma, 1.0 - offset))


def _takes_norm_bias(reading: Reading, facts: Architecture) -> bool:
    """Return whether all readers have a bias, so that the norm's bias can be folded into them.

    If some readers have no bias, the norm's bias must be divided by the norm's weight. If this division is
    impossible, raise UnsupportedError.
    """
    if all(_own(reader, ("bias",)) for reader in reading.readers.values()):
        return True
    if _own(reading.norm, ("weight", "bias")) == ("weight", "bias"):
        gamma = reading.norm.get_parameter("weight") + (1.0 if facts.norm_has_unit_offset else 0.0)
        if bool(((gamma == 0) & (reading.norm.get_parameter("bias") != 0)).any()):
            where = f"{reading.name}: a channel of this norm has the weight 0 and a bias, but not every layer that reads it has a bias"
            raise UnsupportedError(f"{where}. The norm cannot be folded. Leave out rotation")
    return False


def _see_fit(stream: Stream, facts: Architecture, rotation: Rotation) -> None:
    if facts.norm_subtracts_mean and not rotation.keeps_mean:
        raise ConfigError(
            f"the norms of {facts.model_type} subtract the mean, but this rotation does not preserve it. Create the rotation with r1_of()"
        )
    axes = [(name, module, 1 if _has_outputs_last(module) else 0) for name, module in stream.writers.items()]
    axes += [(name, module, input_axis(module)) for reading in stream.readings for name, module in reading.readers.items()]
    for name, module, axis in axes:
        width = module.get_parameter("weight").shape[axis]
        if width != rotation.width:
            raise ConfigError(
                f"{name} has {width} channels of the residual stream, but the rotation has {rotation.width}. Create one of the same width"
            )


def _rotated_values(modules: ResolvedMapping, name: str, rotation: Rotation) -> Tensor:
    """Return the parameter ``name`` (weight or bias) of the value projection after a rotation of the outputs
    of each head.
    """
    projection = modules.smooth_layer
    old = _master(projection.get_parameter(name))
    is_transposed = old.ndim == 2 and not _has_outputs_last(projection)
    outputs_last = old.t() if is_transposed else old
    rows = torch.arange(outputs_last.shape[-1]) if modules.rows is None else modules.rows
    rows = rows.to(outputs_last.device)
    new = outputs_last.clone()
    new[..., rows] = rotation.apply(outputs_last[..., rows].unflatten(-1, (-1, rotation.width))).flatten(-2)
    return new.t() if is_transposed else new


def _has_outputs_last(module: nn.Module) -> bool:
    """Return whether the last axis of a module's weight has the output channels.

    The result is True for embeddings and for layers with a transposed weight.
    """
    return isinstance(module, nn.Embedding) or input_axis(module) == 0


def _in_columns(module: nn.Module, weight: Tensor) -> Tensor:
    """Transpose a module's weight if the last axis does not have the input channels.

    A second call restores the original order of the axes.
    """
    return weight if input_axis(module) == 1 else weight.t()


def _own(module: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if isinstance(getattr(module, name, None), nn.Parameter))


def _master(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64 if tensor.dtype is torch.float64 else torch.float32)


def _replace(module: nn.Module, name: str, value: Tensor) -> None:
    old = module.get_parameter(name)
    setattr(module, name, nn.Parameter(value.to(old.dtype).contiguous(), requires_grad=old.requires_grad))
