"""Transform: changes the weights of a block but not its function, so that rounding loses less."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import attrs
from torch import Tensor, nn

from quark.algorithms.rounding import Metrics, Rounding
from quark.algorithms.statistics import Statistic
from quark.algorithms.validation import OutputError, Validation
from quark.config.algorithm import AlgoConfig
from quark.config.architecture import Architecture
from quark.config.layer import QLayerConfig
from quark.models.plan.quant_plan import QuantPlan

S = TypeVar("S", bound=Statistic)


@attrs.frozen(eq=False)
class BlockContext:
    """One block that a transform may change. Layers are named relative to it.

    Attributes:
        name: Full name of the block.
        module: The block, with all its weights float.
        architecture: Facts about the family.
        configs: Quantization of each layer that will be quantized.
        statistics: Statistics of the input of each of these layers, by class, without held-out tokens. The
            block runs in float, on the outputs of the quantized blocks before it.
        output_error: Computes the error of the block's output on held-out tokens if the block were rounded to
            nearest now; compare two with `quark.algorithms.validated`. None if no transform needs statistics,
            because then there are no forwards.
        output: Computes the block's output on the same tokens with its present weights,
            ``[tokens, channels]``; None if ``output_error`` is None.
        model_config: Configuration of the model, or of its text part, with sizes and numbers of heads; None
            if there is none.
        needs: Statistics that the transform declares; None if unknown.
    """

    name: str
    module: nn.Module
    architecture: Architecture
    configs: Mapping[str, QLayerConfig]
    statistics: Mapping[str, Mapping[type[Statistic], Statistic]]
    output_error: Callable[[], OutputError] | None = None
    output: Callable[[], Tensor] | None = None
    model_config: Any = None
    needs: Sequence[type[Statistic]] | None = None

    def statistic(self, layer: str, kind: type[S]) -> S | None:
        """Return the statistic of that class of a layer's input.

        None if no token reached the layer, or the layer will not be quantized.

        Raises:
            KeyError: The transform does not declare it in its ``needs``.
        """
        if self.needs is not None and kind not in self.needs:
            names = ", ".join(need.__name__ for need in self.needs) or "none"
            raise KeyError(f"asked for the statistic {kind.__name__}, which it does not declare: its needs are {names}")
        return cast("S | None", self.statistics.get(layer, {}).get(kind))

    def input_is_transformed(self, layer: str) -> bool:
        """Return whether something changes the layer's input while the model runs (`input_is_transformed`).

        Then no scale may be moved into the layer.
        """
        return input_is_transformed(self.module.get_submodule(layer))


def input_is_transformed(layer: nn.Module) -> bool:
    """Return whether a layer's input differs from the output of the modules before it.

    A rotation that runs with the model changes it, by a forward pre-hook of the layer: an object with the
    attribute ``transforms_input = True``.
    """
    return any(getattr(hook, "transforms_input", False) for hook in layer._forward_pre_hooks.values())


@attrs.frozen
class ResolvedSettings:
    """The settings of an algorithm for one model.

    Attributes:
        settings: The settings that its checkpoint stores.
        notes: Lines for the plan.
    """

    settings: AlgoConfig
    notes: tuple[str, ...] = ()


class TransformRun:
    """A transform that was started with one model, with the facts that it has learned about that model.

    Every method has a default, which changes nothing.
    """

    def apply_global(self, model: nn.Module) -> None:
        """Change tensors outside the decoder blocks, such as embeddings and head.

        It is called once, before any block. Tensors inside the blocks may be on the meta device.
        """

    def apply(self, block: BlockContext) -> Mapping[str, Metrics]:
        """Change the values of one block's parameters, and return metrics by full name of a layer or block.

        ``applied: False`` in the metrics of the block means that the block is unchanged. If the transform has
        changed nothing in the whole model, it is removed from the plan and from the settings in the
        checkpoint, with a warning.

        The pipeline checks that a block with ``applied: False`` is unchanged, and that all parameters are
        finite and keep their shapes and dtypes. Modules and hooks stay the same, unless the settings say
        `runs_with_model`.
        """
        return {block.name: {"applied": False}}

    def finish(self, block: BlockContext) -> Mapping[str, Metrics]:
        """Change one block once more after every transform has been applied to it.

        For example, a rotation that runs with the model changes a layer's input only here, after other
        transforms have moved scale into that layer. If several transforms finish, they do so in reverse
        order. There are no statistics, because they were collected before the block's transforms.
        """
        return {}

    def learned(self) -> Any:
        """Return the facts that this run has learned from the blocks so far and needs later, as a JSON value.

        A resumed run does not apply transforms to finished blocks, but restores this value.
        """
        return None

    def recall(self, learned: Any) -> None:
        """Restore the value that `learned` returned in another process."""

    def transformed_stream(self, x: Tensor) -> Tensor:
        """Return hidden states of the changed model, given the original ``x [batch, tokens, channels]``."""
        return x


class Transform(TransformRun):
    """Changes values of parameters, and keeps the function of the model.

    A subclass defines what it needs, and at least `apply`, or `start` if another object does the work. The
    transform itself only holds settings, and never changes.

    If the transform leaves other things in a model, such as hooks on layers, its record names a ``restorer``
    for them. The record also says which transforms it goes before or after, and which it excludes
    (`quark.plugins.AlgorithmRecord`).

    Attributes:
        needs: Statistics of layers' inputs in float; without any, no calibration data are needed.
        works_by_block: Whether it works with one block in memory at a time, and adds no tensors to a block.
            `apply_global` may change, add and untie tensors outside the blocks, because a checkpoint is laid
            out after it. If False, a run has the whole model in memory.
        is_validated: Whether it is tried on copies of the blocks first, because it changes the whole model
            and cannot be undone block by block. Each block is copied twice. A run that is started for the
            trial changes one copy, without `apply_global`; the later transforms, such as an equalization,
            change both. `accepts` decides by the output errors of the two copies on held-out tokens.
        settings: Settings of an alternative, which a run uses and a checkpoint stores if it is chosen.
    """

    needs: Sequence[type[Statistic]] = ()
    works_by_block: bool = True
    is_validated: bool = False
    settings: AlgoConfig

    def resolve_for_model(self, model: nn.Module, plan: QuantPlan) -> ResolvedSettings | None:
        """Return the settings for this model, such as names of layers; None if they fit all models.

        Do not change the model; its tensors may be on the meta device. The run uses a transform with the
        returned settings. Resolving these again must give the same settings.

        Raises:
            ConfigError, UnsupportedError: The settings do not fit this model.
        """
        return None

    def start(self, model: nn.Module, plan: QuantPlan) -> TransformRun:
        """Return the run that will change ``model``; this method changes nothing.

        By default, it returns this object, which must then keep no facts about the model.

        Args:
            model: Its structure is complete; tensors may be on the meta device until their block is
                processed.
            plan: The quantization of each layer; its configuration has the settings of `resolve_for_model`.
        """
        return self

    def rounding(self) -> Rounding | None:
        """Return the rounding to use if the run names none; None for round-to-nearest."""
        return None

    def accepts(self, validation: Validation | None) -> bool:
        """Return whether to apply it, if ``is_validated``; by default, if the error falls, or without data.

        Args:
            validation: Error of quantized blocks before and after, the mean over blocks; None without data.
        """
        return validation is None or validation.is_improvement

    def alternatives(self) -> Mapping[str, Transform]:
        """Return transforms that each do a part of this one, by name for reports, the simplest first.

        If ``is_validated``, each is validated like the whole. If two differ by no more than the standard
        error, the first is used. If no alternative lowers the error, the run uses an alternative without
        ``is_validated``, whose effect does not show in outputs. Each alternative has
        its own ``settings``.
        """
        return {}
