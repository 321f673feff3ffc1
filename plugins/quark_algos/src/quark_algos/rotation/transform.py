"""`Rotate`: the transform that folds R1 and R2 into weights and installs the online rotations R3 and R4."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import BlockContext, Metrics, ResolvedSettings, Transform, TransformRun, Validation
from quark.base.log import get_logger
from quark.base.names import folded
from quark.config.algorithm import AlgoConfig
from quark.errors import UnsupportedError
from quark.models.plan.family import text_config
from quark.models.plan.quant_plan import QuantPlan
from quark_algos.rotation import fold as folding
from quark_algos.rotation.choice import block_size, online_layers, rotate_heads, rotated_attentions
from quark_algos.rotation.config import OnlineRotationConfig, RotationConfig
from quark_algos.rotation.hadamard import Rotation
from quark_algos.rotation.norm_form import as_measured
from quark_algos.rotation.online import InputRotation, rotate_input
from quark_algos.rotation.residual_stream import in_block, outside_blocks
from quark_algos.rotation.restore import keep_matrices
from quark_algos.rotation.user_stream import UserStream, user_stream

__all__ = ["Rotate", "RotationRun"]

_SEEDS = {"r1": 0, "r2": 1}


class Rotate(Transform):
    """Rotates a model. The rotations are R1, R2, R3 and R4.

    R1 rotates the residual stream, and R2 rotates the values of attention. Both are folded into weights, so
    they cost nothing when the model runs. The other rotations are computed while the model runs (online): R3
    rotates queries and keys, R4 rotates the inputs of the MLPs' output projections, and
    ``online_r1_rotation`` rotates the inputs of the layers that read the residual stream. Source: QuaRot,
    arXiv 2404.00456; SpinQuant, arXiv 2405.16406.

    Whether a rotation reduces the error depends on the format. Formats with block scales, such as MXFP4, are
    accurate if the values in a block are similar, and a rotation of the full width mixes the values of
    different blocks. A rotation of the model cannot be undone for single decoder blocks. So copies of decoder
    blocks are rotated first, with all combinations of R1, R2 and the online rotations, together with the
    later transforms of the run. The preset ``"best"`` uses the combination with the smallest output error on
    held-out tokens, or no rotation. The preset ``"reference"`` applies all rotations, and logs the errors if
    they do not decrease. Without calibration data, there is no validation, and a warning is logged. R3
    changes only a quantized cache, and the copies have no such cache. So R3 is always applied, and the plan
    has a note about it.

    Args:
        settings: A `RotationConfig`.

    Raises:
        UnsupportedError: The settings request learned rotations, or inputs that are scaled before a rotation.
    """

    settings: RotationConfig

    def __init__(self, settings: AlgoConfig) -> None:
        assert isinstance(settings, RotationConfig)  # the class in the record
        refused = settings.refused()
        if refused:
            raise UnsupportedError(
                f"rotation with {', '.join(refused)} is not supported, because rotations here are Hadamard matrices. Leave out this option"
            )
        self.settings = settings
        self.is_validated = not settings.is_r3_alone()

    def alternatives(self) -> Mapping[str, Rotate]:
        """Return a dictionary from name to transform. Each transform applies only some of R1, R2 and the
        online rotations.

        The result is empty for the preset "reference", which applies all rotations.
        """
        return {} if self.settings.preset == "reference" else {name: Rotate(part) for name, part in self.settings.parts().items()}

    def resolve_for_model(self, model: nn.Module, plan: QuantPlan) -> ResolvedSettings:
        """Return settings that name the layers whose inputs are rotated, and notes for the plan.

        See `quark.algorithms.Transform.resolve_for_model`. R3 is left out if it changes nothing. R1 is left
        out if the architecture does not allow R1, with two exceptions: R1 is the only rotation, or the user
        has given ``scaling_layers``. In these two cases, `start` raises an error.
        """
        facts = plan.architecture
        assert facts is not None  # a plan with transforms has one
        requested, shapes = self.settings, {row.name: row.shape for row in plan.rows}
        notes = []
        impossible = None if requested.online_r1_rotation else RotationConfig.r1_refusal(facts)
        if impossible and (requested.r2 or requested.r3 or requested.runs_with_model()) and not requested.scaling_layers:
            requested = attrs.evolve(requested, r1=False)
            notes.append(f"r1 is left out: {impossible}")
        if requested.r1 and not requested.online_r1_rotation and (measured := as_measured(facts, model)) != facts:
            subtract = "subtract the mean" if measured.norm_subtracts_mean else "do not subtract the mean"
            get_logger(__name__).warning(
                f"The template of '{facts.model_type}' says norm_subtracts_mean={facts.norm_subtracts_mean} and norm_has_unit_offset="
                f"{facts.norm_has_unit_offset}, but the norms of this model {subtract} and multiply by "
                f"{'1 + weight' if measured.norm_has_unit_offset else 'their weight'}. The rotation is made for the model's norms. Correct "
                f"the template."
            )
        names = online_layers(requested, model, plan)
        sizes = {block_size(requested, name, shapes[name][1]) for name in names}
        heads = rotated_attentions(model, plan.attentions, plan.rows) if requested.r3 else {}
        online = attrs.evolve(requested.online_config or OnlineRotationConfig(shared_parallel=False), online_rotation_layers=list(names))
        settings = attrs.evolve(requested, r3=bool(heads), r4=requested.r4 and bool(names), online_config=online if names else None)
        if names:
            blocks = ", ".join(str(size) for size in sorted(sizes))
            notes.append(f"inputs of {len(names)} layers are rotated while the model runs, in blocks of {blocks}: {folded(names)}")
        elif requested.r4:
            notes.append("r4 is left out: no down projection is quantized")
        if heads:
            notes.append(
                f"queries and keys of {len(heads)} attention modules are rotated while the model runs (r3); validation does not measure "
                "whether this reduces the error of the quantized cache"
            )
        elif requested.r3:
            notes.append("r3 is left out: no keys are quantized after the rotary embedding (kv_cache_post_rope)")
        return ResolvedSettings(settings, tuple(notes))

    def start(self, model: nn.Module, plan: QuantPlan) -> RotationRun:
        """Check that the model can be rotated, and return the run for this model."""
        return RotationRun(self.settings, model, plan)

    def accepts(self, validation: Validation | None) -> bool:
        """Return whether the rotation is applied.

        It is applied if the output error decreases, if there is no validation, if the preset is "reference",
        or if only R3 is on.
        """
        if validation is None:
            get_logger(__name__).warning(
                "The rotation is not validated, because there is no calibration data. Compare the result with a run without rotation, "
                "above all for formats with one scale per block of values."
            )
            return True
        if validation.is_improvement:
            return True
        if self.settings.is_r3_alone():
            get_logger(__name__).warning(
                f"Only r3 is applied: no other rotation reduces the output error on {validation.tokens} held-out tokens. Validation does "
                "not measure whether r3 reduces the error of the quantized cache. With preset='reference', all rotations would be applied."
            )
            return True
        is_accepted = self.settings.preset == "reference"
        errors = f"{validation.before:.2g} to {validation.after:.2g}, standard error {validation.standard_error:.1g}"
        outcome = "it is applied because of preset='reference'" if is_accepted else "it is left out (preset='reference' would apply it)"
        get_logger(__name__).warning(
            f"Rotation does not reduce the output error: on {validation.tokens} held-out tokens the error of quantized blocks becomes "
            f"{validation.factor:.2f} times as large ({errors}), so {outcome}."
        )
        return is_accepted


class RotationRun(TransformRun):
    """The rotation of one model.

    Args:
        settings: The settings, resolved for the model.
        model: The model before it is rotated.
        plan: The plan of the run.

    Raises:
        ConfigError, UnsupportedError: The model cannot be rotated with these settings.
    """

    def __init__(self, settings: RotationConfig, model: nn.Module, plan: QuantPlan) -> None:
        assert plan.architecture is not None  # a plan with transforms has one
        text = text_config(model)
        self._heads = int(text.num_attention_heads)
        self._settings = settings
        self._plan = plan
        self._architecture = plan.architecture
        self._user_stream: UserStream | None = None
        self._r1: Rotation | None = None
        if settings.r1 and not settings.online_r1_rotation:
            width = int(text.hidden_size)
            self._user_stream = user_stream(settings, model, plan.architecture, width)
            self._architecture = as_measured(plan.architecture, model) if self._user_stream is None else self._user_stream.facts
            seed = _SEEDS["r1"] if settings.random_r1 else None
            self._r1 = folding.r1_of(width, self._architecture, settings.rotation_size, seed)
        self._online: dict[str, InputRotation] = {}
        rotations: dict[int, InputRotation] = {}
        shapes = {row.name: row.shape for row in plan.rows}
        for name in online_layers(settings, model, plan):
            size = block_size(settings, name, shapes[name][1])
            self._online[name] = rotations.setdefault(size, InputRotation(size))

    def transformed_stream(self, x: Tensor) -> Tensor:
        """Return the residual stream of the rotated model if ``x`` is the stream of the original model."""
        return x if self._r1 is None else self._r1.apply(x)

    def apply_global(self, model: nn.Module) -> None:
        """Rotate and untie the embeddings and the head. Install R3, and register the matrices of online
        rotations.
        """
        if self._settings.r3:
            rotate_heads(model, rotated_attentions(model, self._plan.attentions, self._plan.rows))
        keep_matrices(model, {rotation.size for rotation in self._online.values()})
        if self._r1 is not None:
            user = self._user_stream
            stream = outside_blocks(model, self._architecture) if user is None else user.names[""].resolve(model)
            folding.fold_r1(stream, self._architecture, self._r1)
            folding.untie(model)

    @torch.no_grad()
    def apply(self, block: BlockContext) -> Mapping[str, Metrics]:
        """Fold R1 and R2 into one block. Return metrics that state which of the two were applied."""
        if self._r1 is not None:
            user = self._user_stream
            stream = in_block(block.module, self._architecture) if user is None else user.names[block.name].resolve(block.module)
            folding.fold_r1(stream, self._architecture, self._r1)
        seed = _SEEDS["r2"] if self._settings.random_r2 else None
        reason = folding.fold_r2(block.module, block.architecture, self._heads, seed) if self._settings.r2 else None
        metrics: Metrics = {"r1": self._settings.r1, "r2": self._settings.r2 and reason is None}
        return {block.name: metrics if reason is None else {**metrics, "r2_reason": reason}}

    @torch.no_grad()
    def finish(self, block: BlockContext) -> Mapping[str, Metrics]:
        """Rotate the inputs of the block's layers (R4, and R1 if it is online).

        Return a dictionary from the full name of each rotated layer to metrics with the block size of the
        rotation.

        The inputs are rotated after equalization, because without equalization, a single channel with huge
        values would dominate all channels of the rotated input. The norm of the input times the norm of the
        weight determines the error after rotation. SmoothQuant's scale ``(max|x| / max|w|)^½`` nearly
        minimizes this product.
        """
        prefix = f"{block.name}." if block.name else ""
        inside = {name: rotation for name, rotation in self._online.items() if name.startswith(prefix)}
        for name, rotation in inside.items():
            rotate_input(block.module.get_submodule(name.removeprefix(prefix)), rotation)
        return {name: {"input_rotation": rotation.size} for name, rotation in inside.items()}
