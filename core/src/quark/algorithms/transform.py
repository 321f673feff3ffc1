"""Transform: change the weights of a block and keep what it computes, so that rounding loses less."""

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
        module: The block, all its weights float.
        architecture: Facts about the family.
        configs: What each layer is going to be quantized to.
        statistics: Of the input of each of these layers, by class: of what the quantized blocks before give
            to this one in float, without tokens that are held out.
        output_error: Computes the error of the block's output on held-out tokens, were the block rounded to
            nearest as it is now; compare two with `quark.algorithms.validated`. None where no transform asks
            for statistics, since no forward is at hand then.
        output: Computes the block's output on the same tokens, as its weights are now,
            ``[tokens, channels]``; None likewise.
        model_config: The configuration of the model, or of the part that makes text, with sizes and numbers
            of heads; None where there is none.
        needs: Statistics that the transform declares; None where that is not known.
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

        None where no token reached it, or it is not going to be quantized.

        Raises:
            KeyError: The transform does not declare it in its ``needs``.
        """
        if self.needs is not None and kind not in self.needs:
            names = ", ".join(need.__name__ for need in self.needs) or "none"
            raise KeyError(f"asked for the statistic {kind.__name__}, which it does not declare: its needs are {names}")
        return cast("S | None", self.statistics.get(layer, {}).get(kind))

    def input_is_transformed(self, layer: str) -> bool:
        """Return whether something changes the layer's input while the model runs (see there).

        No scale may move into it then.
        """
        return input_is_transformed(self.module.get_submodule(layer))


def input_is_transformed(layer: nn.Module) -> bool:
    """Return whether a layer gets another input than the modules before it give.

    A rotation that runs with the model changes it so.

    What changes it is a forward pre-hook of the layer: an object with the attribute
    ``transforms_input = True``.
    """
    return any(getattr(hook, "transforms_input", False) for hook in layer._forward_pre_hooks.values())


@attrs.frozen
class ResolvedSettings:
    """The settings of an algorithm for one model.

    Attributes:
        settings: As they are written to its checkpoint.
        notes: Lines for the plan.
    """

    settings: AlgoConfig
    notes: tuple[str, ...] = ()


class TransformRun:
    """A transform at work on one model: what it knows of the model, decided when it was started.

    Every method has a default, which changes nothing.
    """

    def apply_global(self, model: nn.Module) -> None:
        """Change tensors outside the decoder blocks, such as embeddings and head.

        Called once, before any block. Tensors inside the blocks may be on the meta device.
        """

    def apply(self, block: BlockContext) -> Mapping[str, Metrics]:
        """Change the values of one block's parameters.

        Return metrics by full name of a layer or of the block.

        Metrics of the block that say ``applied: False`` mean that it is as it was. A transform that says so
        of every block, and has changed nothing outside them, is left out of the plan, and of the settings
        that a checkpoint keeps, with a warning.

        The pipeline checks that a block that is said to be as it was has the values that it had, and that all
        parameters are finite and have the shapes and dtypes they had. Modules and hooks stay the same, unless
        the settings say `runs_with_model`.
        """
        return {block.name: {"applied": False}}

    def finish(self, block: BlockContext) -> Mapping[str, Metrics]:
        """Change one block once more when every transform has been applied to it.

        A rotation that runs with the model is such a part: what it does to a layer's input is not there yet
        when other transforms move scale into that layer. Where several transforms finish, the last one is
        first. There are no statistics: those that were collected are of the block as it was before.
        """
        return {}

    def learned(self) -> Any:
        """Return the knowledge from the blocks so far by which it decides about the next, as a JSON value.

        A run that is resumed does not apply transforms to the blocks that are finished: it hands on what was
        learned from them.
        """
        return None

    def recall(self, learned: Any) -> None:
        """Replace the knowledge by the value that `learned` gave in another process."""

    def transformed_stream(self, x: Tensor) -> Tensor:
        """Return the changed model's hidden states, where ``x [batch, tokens, channels]`` are this one's."""
        return x


class Transform(TransformRun):
    """Changes values of parameters, and keeps the function of the model.

    A subclass defines what it needs, and at least `apply`, or `start` where the run is another object. Itself
    it is settings, and never changes.

    What else it leaves in a model, such as hooks on layers, is put back on reading by the record's
    ``restorer``. Which transforms it goes before or after, and which it excludes, its record says
    (`quark.plugins.AlgorithmRecord`).

    Attributes:
        needs: Statistics of layers' inputs in float; without any, no calibration data are needed.
        works_by_block: Whether it works with one block in memory at a time, and adds no tensors to a block.
            `apply_global` may change, add and untie tensors outside the blocks: a checkpoint is laid out
            after it. Where False, a run has the whole model in memory.
        is_validated: Whether it is tried on copies of the blocks first, since it changes the whole model and
            cannot be taken back block by block. Each block's copy is changed by a run that was started for
            that, without `apply_global` before, and by the transforms that follow in the run, such as an
            equalization. Its output error on held-out tokens is compared with that of a copy that only the
            latter have changed, and `accepts` decides.
        settings: Those of an alternative, with which a run uses it, and which a checkpoint keeps.
    """

    needs: Sequence[type[Statistic]] = ()
    works_by_block: bool = True
    is_validated: bool = False
    settings: AlgoConfig

    def resolve_for_model(self, model: nn.Module, plan: QuantPlan) -> ResolvedSettings | None:
        """Return the settings for this model, such as names of layers; None if they are definite anyway.

        Nothing of the model is changed, and its tensors may be meta tensors. The run that follows has the
        transform of the settings that this returns, which resolve to themselves.

        Raises:
            ConfigError, UnsupportedError: What is asked for does not fit this model.
        """
        return None

    def start(self, model: nn.Module, plan: QuantPlan) -> TransformRun:
        """Return the run that is to change ``model``, which has not been changed and is not changed here.

        By default it is this object, which then needs to know nothing of the model.

        Args:
            model: Its structure is complete; tensors may be on the meta device until their block's turn.
            plan: What will be done to each layer; its configuration has the settings as `resolve_for_model`
                has decided them.
        """
        return self

    def rounding(self) -> Rounding | None:
        """Return the rounding that goes with it where a run names none; None for round-to-nearest."""
        return None

    def accepts(self, validation: Validation | None) -> bool:
        """Return whether to apply it, if ``is_validated``: by default, if it does not fail its validation.

        Args:
            validation: The error of quantized blocks before and after, the mean over blocks; None where there
                are no data.
        """
        return validation is None or validation.is_improvement

    def alternatives(self) -> Mapping[str, Transform]:
        """Return transforms that each do a part of this one, by a name for reports, the simplest first.

        If ``is_validated``, each is validated like the whole. Of two that have no difference above the
        standard error the first is used. Each has its ``settings``.
        """
        return {}
