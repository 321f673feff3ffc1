"""Settings of rotations: orthogonal changes of basis that spread outliers over all channels."""

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
"""Placeholders in names for the number of a block, and of the block before."""


@with_positional("shared_parallel", "online_rotation_layers", "use_input_prescale")
@with_dataclass_view
@attrs.define(kw_only=True)
class OnlineRotationConfig:
    """Rotations that run with the model instead of being folded into its weights.

    Attributes:
        shared_parallel: Whether layers of an input group share one rotation.
        online_rotation_layers: Full names of the layers whose inputs are rotated while the model runs; None
            for all layers of R4, and of R1 if it is online. Checkpoints always name them.
        use_input_prescale: Scale inputs before rotating them; not supported.
    """

    shared_parallel: bool
    online_rotation_layers: list[str] | None = None
    use_input_prescale: bool = False


_DROPPED = "shared_input_rotation"
"""A key of older releases that is ignored: tensor names in the checkpoint carry the information."""


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
    """Rotations R1 to R4 of a model (QuaRot, arXiv 2404.00456; SpinQuant, arXiv 2405.16406).

    Attributes:
        scaling_layers: The modules that R1 is folded into. The keys ``first_layer``, ``middle_layers`` and
            ``last_layer`` have lists of entries. In an entry, ``prev_modules`` write to the residual stream,
            and ``next_modules`` read it through ``norm_module``. ``layer_id`` and ``pre_layer_id`` stand for
            numbers of blocks; names that a block does not have are ignored for it.
        r1: Rotate the residual stream.
        r2: Rotate values, head by head.
        r3: Rotate queries and keys after the rotary embedding, head by head, while the model runs. Applies
            only to attentions whose keys are quantized there (``kv_cache_post_rope``).
        r4: Rotate the inputs of the output projections of MLPs and experts while the model runs.
        rotation_size: Size of the blocks of a block-diagonal rotation; None for the full width.
        random_r1: Use a randomized Hadamard matrix for R1. ``random`` sets both this and ``random_r2``.
        random_r2: Use a randomized Hadamard matrix for R2.
        backbone: Name of the module that holds embeddings and blocks; this name and the next five are part of
            AMD Quark's public API, and not used: the template has them.
        model_decoder_layers: Full name of the list of decoder blocks.
        v_proj: Value projection, relative to a decoder block.
        o_proj: Output projection of attention, relative to a decoder block.
        self_attn: Attention, relative to a decoder block.
        mlp: MLP, relative to a decoder block.
        online_r1_rotation: Rotate the inputs of the layers that read the residual stream while the model
            runs, instead of the stream; None is False.
        online_config: Settings of rotations that run with the model.
        trainable: Learn the rotations; not supported.
        train_smooth: Learn equalization scales as well; not supported.
        smooth_positions: Mappings of ``train_smooth``; not used.
        preset: ``"best"`` omits R1, R2 or the online rotations if they do not reduce the error on held-out
            tokens; ``"reference"`` applies all and warns. Both apply R3: it changes only a quantized cache,
            which that error does not measure.
        random: Accepted from configurations before 0.12.
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
        """Return whether a rotation runs with the model: R3, R4 or R1 online."""
        return self.r3 or self._rotates_inputs()

    def separates_experts(self) -> bool:
        """Return whether a rotation is folded into experts or runs before their layers: R1 or R4."""
        return self.r1 or self._rotates_inputs()

    def is_r3_alone(self) -> bool:
        """Return whether R3 is on, and no rotation that changes the output of blocks with a float cache."""
        return self.r3 and not (self.r1 or self.r2 or self._rotates_inputs())

    def parts(self) -> dict[str, Self]:
        """Return settings for each proper subset of the rotations that change the output of blocks.

        Keys are the names of the rotations, smallest subsets first.

        The rotations are R1, R2, and all online rotations except R3 together. If R3 is on, it is in every
        subset, and the first subset is R3 alone. Empty if only one rotation is on.
        """
        folded_r1 = self.r1 and not self.online_r1_rotation
        present = [name for name, is_on in (("r1", folded_r1), ("r2", self.r2), ("online", self._rotates_inputs())) if is_on]
        subsets = chain.from_iterable(combinations(present, count) for count in range(0 if self.r3 else 1, len(present)))
        return {" + ".join(subset) or "r3": self._only(subset, folded_r1) for subset in subsets}

    def _rotates_inputs(self) -> bool:
        """Return whether layer inputs are rotated online: by R4, R1 online, or by name."""
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
        """Return settings with R1 on all writers and readers of the residual stream.

        Use R2 if R1 is impossible; None if both are.
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
        """Return a reason if neither R1 nor R2 can be folded into the weights of a family."""
        r1, r2 = cls.r1_refusal(architecture), cls.r2_refusal(architecture)
        return None if r1 is None or r2 is None else f"r1: {r1}; r2: {r2}; set r4 for a rotation that runs with the model"

    @classmethod
    def r2_refusal(cls, architecture: Architecture) -> str | None:
        """Return a reason why R2 cannot be used, or None.

        All operations between values and attention's output projection must commute with a rotation of each
        head.
        """
        if architecture.attention_value is None or architecture.attention_output is None:
            return "its template names no value projection that reaches the output projection linearly"
        return architecture.unsupported.get("rotation") or architecture.unsupported.get("rotation.r2")

    @classmethod
    def r1_refusal(cls, architecture: Architecture) -> str | None:
        """Return a reason why R1 cannot be used, or None.

        All operations between the residual stream and its writers and readers must commute with a rotation.
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
        """Return the settings of a JSON form.

        Under the older name ``"quarot"`` all four rotations are on by default.
        """
        if data.get("name") == "quarot":
            return QuaRotConfig(**data | {"name": "rotation"})
        return cls(**data)


@with_dataclass_view
@attrs.define(kw_only=True)
class QuaRotConfig(RotationConfig):
    """Rotation settings under their older name, with all four rotations on by default."""

    r2: bool = True
    r3: bool = True
    r4: bool = True


def _residual_stream(facts: Architecture) -> dict[str, list[dict[str, Any]]]:
    """Return the writers and readers of the residual stream in the form of ``scaling_layers``."""

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
