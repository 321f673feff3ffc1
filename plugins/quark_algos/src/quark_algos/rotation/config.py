"""Settings of rotations.

A rotation is an orthogonal change of basis. It spreads outliers over all channels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain, combinations
from typing import Annotated, Any, Self

import attrs
from attrs import validators

from quark.config.algorithm import AlgoConfig
from quark.config.architecture import Architecture
from quark.config.fields import with_dataclass_view
from quark.plugins import OptionNote
from quark_algos.fields import LEGACY, OWN, PRESETS, UNUSED, with_positional
from quark_algos.mappings.mapping import (
    enclosing,
    readers_of_attention_norm,
    readers_of_mlp_norm,
    writers_before_blocks,
    writers_of_attention,
    writers_of_mlp,
)

__all__ = ["OnlineRotationConfig", "QuaRotConfig", "RotationConfig"]

_HERE, _BEFORE = "layer_id", "pre_layer_id"
"""Placeholders in names: the first one stands for the number of a block, the second one for the previous
number.
"""


@with_positional("shared_parallel", "online_rotation_layers", "use_input_prescale")
@with_dataclass_view
@attrs.define(kw_only=True)
class OnlineRotationConfig:
    """Settings of online rotations, which are computed while the model runs instead of being folded into
    weights.

    Attributes:
        shared_parallel: Whether the layers of an input group share one rotation.
        online_rotation_layers: Full names of the layers whose inputs are rotated. If it is None, these are
            all layers of R4, and also the layers of R1 if R1 is online. Checkpoints always name the layers.
        use_input_prescale: Whether inputs are scaled before they are rotated. This is not supported.
    """

    shared_parallel: bool
    online_rotation_layers: list[str] | None = None
    use_input_prescale: bool = False


_DROPPED = "shared_input_rotation"
"""A key of older releases. It is ignored, because the names of tensors in the checkpoint tell the same."""


def _online(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return OnlineRotationConfig(**{"shared_parallel": False} | {key: one for key, one in value.items() if key != _DROPPED})


@with_positional(
    *("scaling_layers", "name", "r1", "r2", "r3", "r4", "rotation_size", "random_r1", "random_r2"),
    *("backbone", "model_decoder_layers", "v_proj", "o_proj", "self_attn", "mlp", "online_r1_rotation", "online_config"),
    *("trainable", "train_smooth", "smooth_positions"),
)
@with_dataclass_view
@attrs.define(kw_only=True)
class RotationConfig(AlgoConfig):
    """Settings of the rotations R1 to R4 (QuaRot, arXiv 2404.00456; SpinQuant, arXiv 2405.16406).

    The names in ``backbone``, ``model_decoder_layers``, ``v_proj``, ``o_proj``, ``self_attn`` and ``mlp``
    belong to AMD Quark's public API. They are not used, because the names come from the template.

    Attributes:
        scaling_layers: The modules into which R1 is folded. The keys ``first_layer``, ``middle_layers`` and
            ``last_layer`` have lists of entries. In an entry, ``prev_modules`` are the layers that write to
            the residual stream, and ``next_modules`` are the layers that read the stream through
            ``norm_module``. In names, ``layer_id`` stands for the number of a block, and ``pre_layer_id`` for
            the number of the block before it. If a block has no module with such a name, the name is ignored
            for this block.
        r1: Whether the residual stream is rotated.
        r2: Whether the values of attention are rotated, each head separately.
        r3: Whether queries and keys are rotated after the rotary embedding, each head separately, while the
            model runs. R3 applies only to attention modules whose keys are quantized after the rotary
            embedding (``kv_cache_post_rope``).
        r4: Whether the inputs of the output projections of MLPs and experts are rotated while the model runs.
        rotation_size: Size of the blocks of a block-diagonal rotation. If it is None, a rotation has the full
            width.
        random_r1: Whether R1 is a randomized Hadamard matrix. ``random`` sets both this field and
            ``random_r2``.
        random_r2: Whether R2 is a randomized Hadamard matrix.
        backbone: Name of the module that contains embeddings and blocks.
        model_decoder_layers: Full name of the list of decoder blocks.
        v_proj: Name of the value projection, relative to a decoder block.
        o_proj: Name of the output projection of attention, relative to a decoder block.
        self_attn: Name of the attention module, relative to a decoder block.
        mlp: Name of the MLP, relative to a decoder block.
        online_r1_rotation: Whether R1 is online. An online R1 does not rotate the residual stream. It rotates
            the inputs of the layers that read the stream, while the model runs. None means False.
        online_config: Settings of the rotations that are computed while the model runs.
        trainable: Whether rotations are learned. This is not supported.
        train_smooth: Whether equalization scales are learned, too. This is not supported.
        smooth_positions: The mappings for ``train_smooth``. They are not used.
        preset: With ``"best"``, only those rotations are applied that reduce the error on held-out tokens.
            The candidates are R1, R2 and the online rotations. With ``"reference"``, all rotations are
            applied, and a warning is logged if the error does not decrease. Both presets apply R3, because R3
            changes only a quantized cache, and the error on held-out tokens does not measure the cache.
        random: A field of configurations from versions before 0.12. It sets ``random_r1`` and ``random_r2``.
    """

    name: str = "rotation"
    scaling_layers: dict[str, list[dict[str, Any]]] | list[dict[str, Any]]
    r1: bool = True
    r2: bool = False
    r3: bool = False
    r4: bool = False
    rotation_size: Annotated[int | None, OptionNote(beside={"r1": True})] = None
    random_r1: Annotated[bool, OptionNote(beside={"r1": True})] = False
    random_r2: Annotated[bool, OptionNote(beside={"r2": True})] = False
    backbone: str = attrs.field(default="model", metadata=UNUSED)
    model_decoder_layers: str = attrs.field(default="model.layers", metadata=UNUSED)
    v_proj: str = attrs.field(default="self_attn.v_proj", metadata=UNUSED)
    o_proj: str = attrs.field(default="self_attn.o_proj", metadata=UNUSED)
    self_attn: str = attrs.field(default="self_attn", metadata=UNUSED)
    mlp: str = attrs.field(default="mlp", metadata=UNUSED)
    online_r1_rotation: Annotated[bool | None, OptionNote(beside={"r1": True})] = None
    online_config: OnlineRotationConfig | None = attrs.field(default=None, converter=_online)
    trainable: bool = False
    train_smooth: Annotated[bool | None, OptionNote(examples=(True,))] = None
    smooth_positions: list[str] | None = attrs.field(default=None, metadata=UNUSED)
    preset: str = attrs.field(default="best", validator=validators.in_(PRESETS), metadata=OWN)
    random: bool | None = attrs.field(default=None, repr=False, eq=False, metadata=LEGACY)

    def __attrs_post_init__(self) -> None:
        if self.random is not None:
            self.random_r1 = self.random_r2 = self.random
            self.random = None

    def runs_with_model(self) -> bool:
        """Return whether at least one rotation (R3, R4 or an online R1) is computed while the model runs."""
        return self.r3 or self._rotates_inputs()

    def separates_experts(self) -> bool:
        """Return whether a rotation (R1 or R4) is folded into experts or rotates the inputs of their
        layers.
        """
        return self.r1 or self._rotates_inputs()

    def is_r3_alone(self) -> bool:
        """Return whether R3 is the only rotation that is on. If the cache is not quantized, R3 does not
        change the outputs of blocks.
        """
        return self.r3 and not (self.r1 or self.r2 or self._rotates_inputs())

    def parts(self) -> dict[str, Self]:
        """Return settings for each proper subset of the rotations that are on.

        The result is a dictionary. A key has the names of the rotations in the subset, and small subsets come
        first. R1 and R2 are one rotation each, and all online rotations except R3 are treated as a single
        rotation. If R3 is on, every subset includes it, and the first subset has only R3. The result is empty
        if only one rotation is on.
        """
        folded_r1 = self.r1 and not self.online_r1_rotation
        present = [name for name, is_on in (("r1", folded_r1), ("r2", self.r2), ("online", self._rotates_inputs())) if is_on]
        subsets = chain.from_iterable(combinations(present, count) for count in range(0 if self.r3 else 1, len(present)))
        return {" + ".join(subset) or "r3": self._only(subset, folded_r1) for subset in subsets}

    def _rotates_inputs(self) -> bool:
        """Return whether inputs of layers are rotated while the model runs.

        They are if R4 is on, if R1 is online, or if the settings name such layers.
        """
        named = self.online_config is not None and bool(self.online_config.online_rotation_layers)
        return self.r4 or bool(self.r1 and self.online_r1_rotation) or named

    def _only(self, names: Collection[str], folded_r1: bool) -> Self:
        r2 = self.r2 and "r2" in names
        if "online" in names:
            return attrs.evolve(self, r1=self.r1 if not folded_r1 else "r1" in names, r2=r2)
        r1 = folded_r1 and "r1" in names
        return attrs.evolve(self, r1=r1, r2=r2, r4=False, online_r1_rotation=None, online_config=None)

    def refused(self) -> list[str]:
        """Return the names of fields that are set but not supported."""
        unsupported = [name for name in ("trainable", "train_smooth") if getattr(self, name)]
        return unsupported + (["use_input_prescale"] if self.online_config is not None and self.online_config.use_input_prescale else [])

    @classmethod
    def for_architecture(cls, architecture: Architecture) -> Self | None:
        """Return settings for R1. They name all layers that read or write the residual stream.

        If R1 is impossible, return settings for R2. If both are impossible, return None.
        """
        if cls.refusal(architecture) is not None:
            return None
        blocks = architecture.decoder_blocks or ""
        plain_value = architecture.attention_value if architecture.attention_value_rows == "all" else None
        settings = cls(
            scaling_layers={},
            backbone=blocks.rpartition(".")[0],
            model_decoder_layers=blocks,
            v_proj=plain_value or "",
            o_proj=architecture.attention_output or "",
            self_attn=enclosing(architecture.attention_inputs),
            mlp=enclosing(next(iter(readers_of_mlp_norm(architecture)), ())),
        )
        if cls.r1_refusal(architecture) is not None:
            return attrs.evolve(settings, r1=False, r2=True)
        return attrs.evolve(settings, scaling_layers=_residual_stream(architecture))

    @classmethod
    def refusal(cls, architecture: Architecture) -> str | None:
        """Return why neither R1 nor R2 can be folded into the weights of a model family, or None if one of
        them can be folded.
        """
        r1, r2 = cls.r1_refusal(architecture), cls.r2_refusal(architecture)
        return None if r1 is None or r2 is None else f"r1: {r1}; r2: {r2}; set r4 for a rotation that is computed while the model runs"

    @classmethod
    def r2_refusal(cls, architecture: Architecture) -> str | None:
        """Return why R2 cannot be used, or None if it can be used.

        R2 can be used if all operations between the values and the output projection of attention commute
        with a rotation of each head.
        """
        if architecture.attention_value is None or architecture.attention_output is None:
            return "its template names no value projection that reaches the output projection linearly"
        return architecture.unsupported.get("rotation") or architecture.unsupported.get("rotation.r2")

    @classmethod
    def r1_refusal(cls, architecture: Architecture) -> str | None:
        """Return why R1 cannot be used, or None if it can be used.

        R1 can be used if all operations between the residual stream and the layers that read or write it
        commute with a rotation.
        """
        a = architecture
        if reason := a.unsupported.get("rotation") or a.unsupported.get("rotation.r1"):
            return reason
        if a.attention_output_norm or a.mlp_output_norm:
            named = " and ".join(name for name in (a.attention_output_norm, a.mlp_output_norm) if name)
            return f"the norms {named} scale single channels of the outputs added to the residual stream"
        if a.embedding_norm:
            return f"the norm {a.embedding_norm} scales single channels of the residual stream"
        if a.encoder_blocks:
            return "its encoder and its decoder have separate residual streams"
        if a.experts_norm:
            return "its routers read the residual stream without a norm"
        if not all((a.decoder_blocks, a.embeddings, a.final_norm, a.head, a.attention_norm, a.mlp_norm, a.attention_inputs)):
            return "its template does not name all layers that read or write the residual stream"
        return None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RotationConfig:
        """Create settings from a dictionary that was read from JSON.

        If the dictionary has the algorithm's older name ``"quarot"``, all four rotations are on by default.
        """
        if data.get("name") == "quarot":
            return QuaRotConfig(**data | {"name": "rotation"})
        return cls(**data)


@with_dataclass_view
@attrs.define(kw_only=True)
class QuaRotConfig(RotationConfig):
    """Rotation settings under the older name of the class. All four rotations are on by default."""

    r2: bool = True
    r3: bool = True
    r4: bool = True


def _residual_stream(facts: Architecture) -> dict[str, list[dict[str, Any]]]:
    """Return the layers that read or write the residual stream, in the form of ``scaling_layers``."""

    def in_blocks(number: str, names: Iterable[str]) -> list[str]:
        return [f"{facts.decoder_blocks}.{number}.{name}" for name in names]

    def entry(writers: list[str], norm: str | None, readers: Iterable[tuple[str, ...]]) -> dict[str, Any]:
        read = dict.fromkeys(chain.from_iterable(readers))
        return {"prev_modules": writers, "norm_module": f"{facts.decoder_blocks}.{_HERE}.{norm}", "next_modules": in_blocks(_HERE, read)}

    before_attention, before_mlp = readers_of_attention_norm(facts), readers_of_mlp_norm(facts)
    from_attention, from_mlp = writers_of_attention(facts), writers_of_mlp(facts)
    if facts.mlp_norm == facts.attention_norm:  # side by side
        before_attention, from_mlp, inside = (*before_attention, *before_mlp), (*from_attention, *from_mlp), []
    else:
        inside = [entry(in_blocks(_HERE, from_attention), facts.mlp_norm, before_mlp)]
    return {
        "first_layer": [entry([*writers_before_blocks(facts)], facts.attention_norm, before_attention), *inside],
        "middle_layers": [entry(in_blocks(_BEFORE, from_mlp), facts.attention_norm, before_attention), *inside],
        "last_layer": [{"prev_modules": in_blocks(_HERE, from_mlp), "norm_module": facts.final_norm, "next_modules": [facts.head]}],
    }
