"""Rotation as a transform: R1 and R2 folded into weights, R3 and R4 run with the model. Plumbing around `quark_algos.rotation`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import BlockContext, Metrics, ResolvedSettings, Rounding, Statistic, Validation
from quark.config.algorithm import AlgoConfig
from quark.config.architecture import Architecture
from quark.errors import UnsupportedError
from quark.log import get_logger
from quark.names import folded
from quark.planning.plan import QuantPlan
from quark_algos.rotation import fold as folding
from quark_algos.rotation import stored
from quark_algos.rotation.choice import block_size, online_layers, rotate_heads, rotated_attentions
from quark_algos.rotation.config import OnlineRotationConfig, RotationConfig
from quark_algos.rotation.hadamard import Rotation
from quark_algos.rotation.online import InputRotation, rotate_input
from quark_algos.rotation.user_stream import HandWritten, hand_written

__all__ = ["Rotate", "RotationRun"]

_SEEDS = {"r1": 0, "r2": 1}


class Rotate:
    """Rotates the residual stream (R1) and attention's values (R2); both are part of the weights afterwards, and cost nothing at run time.

    Rotated while the model runs are queries and keys (R3), and inputs of layers: of those that close MLPs (R4), and of those that read the
    residual stream, if R1 is asked for that way.

    Whether a rotation does good depends on the format: block formats such as MXFP4 live on blocks of like values, which a rotation of the
    full width mixes. It cannot be taken back block by block, so it is tried on copies of the blocks before: where it does no good on
    held-out tokens, the preset ``"best"`` leaves it out, and ``"reference"`` applies it, and both say by how much. Without calibration data
    nothing can be tried, which is said in a warning.

    Args:
        settings: A `RotationConfig`.

    Raises:
        UnsupportedError: It asks for rotations that are learnt, or for inputs that are scaled before.
    """

    needs: ClassVar[Sequence[type[Statistic]]] = ()
    works_by_block = False

    def __init__(self, settings: AlgoConfig) -> None:
        assert isinstance(settings, RotationConfig)  # its record's class
        refused = settings.refused()
        if refused:
            raise UnsupportedError(
                f"rotation with {', '.join(refused)} is not offered: rotations here are Hadamard matrices. Leave that out"
            )
        self._settings = settings

    def resolve_for_model(self, model: nn.Module, plan: QuantPlan) -> ResolvedSettings:
        """Name the layers whose inputs are rotated, and omit R3 where it changes nothing; see `quark.algorithms.ResolvesForModel`."""
        asked, shapes = self._settings, {row.name: row.shape for row in plan.rows}
        names = online_layers(asked, model, plan)
        sizes = {block_size(asked, name, shapes[name][1]) for name in names}
        heads = rotated_attentions(model, plan.attentions, plan.rows) if asked.r3 else {}
        online = attrs.evolve(asked.online_config or OnlineRotationConfig(shared_parallel=False), online_rotation_layers=list(names))
        settings = attrs.evolve(asked, r3=bool(heads), r4=asked.r4 and bool(names), online_config=online if names else None)
        notes = []
        if names:
            blocks = ", ".join(str(size) for size in sorted(sizes))
            notes.append(f"inputs of {len(names)} layers are rotated while the model runs, in blocks of {blocks}: {folded(names)}")
        elif asked.r4:
            notes.append("r4 is left out: no layer that closes an MLP is going to be quantized")
        if heads:
            notes.append(f"queries and keys of {len(heads)} attention modules are rotated while the model runs")
        elif asked.r3:
            notes.append("r3 is left out: no keys are quantized after the rotary embedding (kv_cache_post_rope)")
        return ResolvedSettings(settings, tuple(notes))

    def start(self, model: nn.Module, plan: QuantPlan) -> RotationRun:
        """Check that the model can be rotated, and return the run with all rotations."""
        assert plan.architecture is not None  # a plan with transforms has one
        return RotationRun(self._settings, model, plan, plan.architecture)

    def accepts(self, validation: Validation | None) -> bool:
        """Return whether to rotate: where that makes the error smaller, or cannot be told, or the preset is "reference"."""
        if validation is None:
            get_logger(__name__).warning(
                "The model is rotated, and nothing judges whether that does good: with calibration data it would be tried before. Compare "
                "with a run without rotation, above all for formats whose blocks share a scale."
            )
            return True
        if validation.is_improvement:
            return True
        is_accepted = self._settings.preset == "reference"
        errors = f"{validation.before:.2g} to {validation.after:.2g}, standard error {validation.standard_error:.1g}"
        done = "it is applied, since preset='reference' asks for it" if is_accepted else "it is left out; preset='reference' would apply it"
        get_logger(__name__).warning(
            f"Rotation does no good here: on {validation.tokens} held-out tokens it makes the error of blocks rounded to nearest "
            f"{validation.factor:.2f} times as large ({errors}), so {done}."
        )
        return is_accepted

    def rounding(self) -> Rounding | None:
        """Round-to-nearest."""
        return None


class RotationRun:
    """The rotations of one model.

    Args:
        settings: As they hold for the model.
        model: Not rotated yet.
        plan: Of the run.
        architecture: Facts about the model's family.

    Raises:
        ConfigError, UnsupportedError: The model cannot be rotated as the settings say.
    """

    def __init__(self, settings: RotationConfig, model: nn.Module, plan: QuantPlan, architecture: Architecture) -> None:
        config: Any = model.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self._heads = int(text.num_attention_heads)
        width = int(text.hidden_size)
        self._settings = settings
        self._plan = plan
        self._architecture = architecture
        self._by_hand: HandWritten | None = None
        self._r1: Rotation | None = None
        if settings.r1 and not settings.online_r1_rotation:
            self._by_hand = hand_written(settings, model, architecture, width)
            facts = architecture if self._by_hand is None else self._by_hand.facts
            self._r1 = folding.r1_of(width, facts, settings.rotation_size, _SEEDS["r1"] if settings.random_r1 else None)
        self._online: dict[str, InputRotation] = {}
        rotations: dict[int, InputRotation] = {}
        shapes = {row.name: row.shape for row in plan.rows}
        for name in online_layers(settings, model, plan):
            size = block_size(settings, name, shapes[name][1])
            self._online[name] = rotations.setdefault(size, InputRotation(size))

    def transformed_stream(self, x: Tensor) -> Tensor:
        """Return the residual stream of the rotated model, ``x`` of the model as it was."""
        return x if self._r1 is None else self._r1.apply(x)

    def apply_global(self, model: nn.Module) -> None:
        """Rotate embeddings and head, which gets a weight of its own; get ready what runs with the model."""
        if self._settings.r3:
            rotate_heads(model, rotated_attentions(model, self._plan.attentions, self._plan.rows))
        stored.keep(model, {rotation.size for rotation in self._online.values()})
        if self._r1 is not None:
            by_hand = self._by_hand
            facts, stream = (self._architecture, None) if by_hand is None else (by_hand.facts, by_hand.outside.of(model))
            folding.outside(model, facts, self._r1, stream)

    @torch.no_grad()
    def apply(self, block: BlockContext) -> Mapping[str, Metrics]:
        """Rotate one block; reports what is rotated."""
        by_hand = self._by_hand
        if self._r1 is not None:
            facts, stream = (block.architecture, None) if by_hand is None else (by_hand.facts, by_hand.blocks[block.name].of(block.module))
            folding.block(block.module, facts, self._r1, stream)
        metrics = self._rotate_inputs(block)
        if not self._settings.r2:
            return metrics | {block.name: {"r1": self._settings.r1, "r2": False}}
        value = block.architecture.attention_value
        width = None if value is None else int(getattr(block.module.get_submodule(value), "out_features", 0))
        reason = self._rotate_values(block, width)
        said: Metrics = {"r1": self._settings.r1, "r2": reason is None, **({} if reason is None else {"r2_reason": reason})}
        return metrics | {block.name: said}

    def _rotate_inputs(self, block: BlockContext) -> dict[str, Metrics]:
        """R4, and R1 online; the size of the rotation by full name of a layer."""
        prefix = f"{block.name}." if block.name else ""
        inside = {name: rotation for name, rotation in self._online.items() if name.startswith(prefix)}
        for name, rotation in inside.items():
            rotate_input(block.module.get_submodule(name.removeprefix(prefix)), rotation)
        return {name: {"input_rotation": rotation.size} for name, rotation in inside.items()}

    def _rotate_values(self, block: BlockContext, width: int | None) -> str | None:
        """R2; the reason why not, where that is so."""
        output = block.architecture.attention_output
        if not width or output is None:
            return "attention has no projection of values alone"
        head = int(getattr(block.module.get_submodule(output), "in_features", 0)) // self._heads
        rotation = Rotation.of(head, None, _SEEDS["r2"] if self._settings.random_r2 else None)
        return folding.values(block.module, block.architecture, rotation, self._heads)
