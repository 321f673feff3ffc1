"""Functions that choose the online rotations of a model: the layers whose inputs are rotated, the block
sizes, and the attention modules that R3 rotates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from torch import nn

from quark.errors import ConfigError, UnsupportedError
from quark.models.layers.attention import BASIS
from quark.models.plan.attention import AttentionRow
from quark.models.plan.decoder_blocks import decoder_blocks
from quark.models.plan.family import text_config
from quark.models.plan.plan_row import PlanRow
from quark.models.plan.quant_plan import QuantPlan
from quark_algos.mappings.mapping import readers_of_attention_norm, readers_of_mlp_norm, writers_of_mlp
from quark_algos.rotation.config import RotationConfig
from quark_algos.rotation.hadamard import Rotation, factors_of
from quark_algos.rotation.residual_stream import matching

__all__ = ["block_size", "online_layers", "rotate_heads", "rotated_attentions"]


def online_layers(settings: RotationConfig, model: nn.Module, plan: QuantPlan) -> tuple[str, ...]:
    """Return the full names of the layers whose inputs are rotated while the model runs.

    The settings may name these layers. If they do not, the function returns the layers of R4 and of an online
    R1. It leaves out layers whose weight will not be quantized, because a rotation is of no use for a float
    layer.

    Raises:
        ConfigError: The settings name a layer that will not be quantized.
        UnsupportedError: R4 is on, but neither the settings nor the architecture name its layers.
    """
    quantized = {row.name for row in plan.quantized if row.has_quantized_matrix}
    named = None if settings.online_config is None else settings.online_config.online_rotation_layers
    if named is not None:
        unknown = [name for name in named if name not in quantized]
        if unknown:
            example = f". A quantized layer is '{min(quantized)}'" if quantized else ""
            raise ConfigError(f"online_rotation_layers names '{unknown[0]}', which is not a quantized linear layer{example}")
        return tuple(named)
    facts = plan.architecture
    assert facts is not None  # a plan with transforms has one
    patterns: list[str] = []
    if settings.r1 and settings.online_r1_rotation:
        patterns += chain.from_iterable((*readers_of_attention_norm(facts), *readers_of_mlp_norm(facts)))
    if settings.r4:
        patterns += writers_of_mlp(facts)
    if settings.r4 and not writers_of_mlp(facts):
        raise UnsupportedError(
            f"r4 rotates the inputs of down projections, but the template of {facts.model_type} does not name them. Set "
            f"online_config.online_rotation_layers, or leave out r4"
        )
    names = (f"{block.name}.{name}".lstrip(".") for block in decoder_blocks(model, facts) for name in matching(block.module, patterns))
    return tuple(name for name in names if name in quantized)


def block_size(settings: RotationConfig, name: str, width: int) -> int:
    """Return the block size of the rotation of a layer's input. The input has ``width`` channels.

    Raises:
        ConfigError: ``rotation_size`` does not divide the width, or this plugin has no Hadamard matrix of
            this size.
    """
    try:
        return Rotation.of(width, settings.rotation_size).block
    except ConfigError as error:
        raise ConfigError(f"the input of '{name}' cannot be rotated: {error}") from None


def rotated_attentions(model: nn.Module, attentions: Sequence[AttentionRow], rows: Iterable[PlanRow]) -> Mapping[str, int]:
    """Return the attention modules that R3 rotates, as a dictionary from full name to head size.

    R3 rotates an attention module if its keys are quantized after the rotary embedding.

    Raises:
        UnsupportedError: This plugin has no Hadamard matrix of the size of a head.
    """
    outputs = {row.name: row.shape[0] for row in rows}
    text = text_config(model)
    heads = int(getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None) or 1)
    sizes = {a.name: outputs[a.key_layer] // heads for a in attentions if a.key_layer is not None}
    for name, size in sizes.items():
        if factors_of(size) is None:
            raise UnsupportedError(
                f"queries and keys of '{name}' cannot be rotated (r3), because heads have {size} channels, and quark has no Hadamard "
                f"matrix of this order. Leave out r3"
            )
    return sizes


def rotate_heads(model: nn.Module, sizes: Mapping[str, int]) -> None:
    """Change attention modules so that they rotate queries and keys. The outputs of attention do not change.

    Args:
        model: The model. During its forward pass, the attention modules must use the functions of
            `quark.models.layers.attention`.
        sizes: A dictionary from the full name of each attention module to its head size.
    """
    for name, size in sizes.items():
        setattr(model.get_submodule(name), BASIS, Rotation(size, size).apply)
