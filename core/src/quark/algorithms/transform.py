"""A transform changes the weights of a block, but not its output, to reduce the error of a later rounding."""

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
    """One block that a transform may change. The names of layers are relative to this block.

    Attributes:
        name: Full name of the block.
        module: The block. All its weights are float.
        architecture: Facts about the model family.
        configs: Mapping from the name of each layer that will be quantized to its configuration.
        statistics: Mapping from the name of each layer in ``configs`` to the statistics of the layer's input.
            These are a mapping from class to statistic. The statistics contain no held-out tokens. They were
            collected while this block ran in float on the outputs of the quantized blocks before it.
        output_error: Function that rounds the current weights of the block to nearest and returns the error
            of the block's output on held-out tokens. `quark.algorithms.validated` compares two such errors.
            None if no transform needs statistics, because there are then no forward passes.
        output: Function that runs the block with its current float weights on the held-out tokens, and
            returns the output, ``[tokens, channels]``. None if ``output_error`` is None.
        model_config: Configuration of the model, or of the text part of the model. It contains, for example,
            sizes and numbers of heads. None if the model has no configuration.
        needs: Classes of the statistics that the transform declares. None if they are unknown.
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
        """Return the statistic of the class ``kind`` for the input of a layer.

        Return None if no token has reached the layer, or if the layer will not be quantized.

        Raises:
            KeyError: The transform does not declare ``kind`` in its ``needs``.
        """
        if self.needs is not None and kind not in self.needs:
            names = ", ".join(need.__name__ for need in self.needs) or "none"
            raise KeyError(f"asked for the statistic {kind.__name__}, which it does not declare: its needs are {names}")
        return cast("S | None", self.statistics.get(layer, {}).get(kind))

    def input_is_transformed(self, layer: str) -> bool:
        """Return the result of the function `input_is_transformed` for a layer of this block.

        If the result is True, do not move a scale into the layer.
        """
        return input_is_transformed(self.module.get_submodule(layer))


def input_is_transformed(layer: nn.Module) -> bool:
    """Return whether a hook changes the input of a layer while the model runs.

    For example, a rotation that runs as part of the model has a forward pre-hook on the layer. Such a hook is
    an object with the attribute ``transforms_input = True``.
    """
    return any(getattr(hook, "transforms_input", False) for hook in layer._forward_pre_hooks.values())


@attrs.frozen
class ResolvedSettings:
    """The settings of an algorithm for one model.

    Attributes:
        settings: The settings that the checkpoint of the model stores.
        notes: Lines about the settings that are printed with the plan.
    """

    settings: AlgoConfig
    notes: tuple[str, ...] = ()


class TransformRun:
    """The application of a transform to one model. The object may store facts about the model.

    Every method has a default implementation, which changes nothing.
    """

    def apply_global(self, model: nn.Module) -> None:
        """Change tensors outside the decoder blocks, such as embeddings and head.

        A run calls this method once, before it processes the first block. Tensors inside the blocks may be on
        the meta device.
        """

    def apply(self, block: BlockContext) -> Mapping[str, Metrics]:
        """Change the values of one block's parameters. Return metrics.

        The result maps the full name of a layer or of the block to its metrics. ``applied: False`` in the
        metrics of the block means that the transform did not change the block. If the transform changed no
        block of the model, the run logs a warning and removes the transform from the plan and from the
        settings in the checkpoint.

        The run checks that a block with ``applied: False`` is unchanged, and that all parameters are finite
        and have the same shapes and dtypes as before. Only if ``runs_with_model()`` of the settings returns
        True, this method may change modules and hooks.
        """
        return {block.name: {"applied": False}}

    def finish(self, block: BlockContext) -> Mapping[str, Metrics]:
        """Change one block again, after all transforms have been applied to it.

        Return metrics in the same form as `apply`. For example, a rotation that runs as part of the model
        adds a hook to a layer here, after other transforms have moved scales into the layer. If there are
        several transforms, a run calls their `finish` methods in reverse order. ``block`` has no statistics,
        because the statistics describe the block before the transforms.
        """
        return {}

    def learned(self) -> Any:
        """Return a JSON value with everything about the processed blocks that later blocks need.

        If a run is resumed, transforms are not applied to finished blocks again. Instead, the run calls
        `recall` with this value.
        """
        return None

    def recall(self, learned: Any) -> None:
        """Restore the value that `learned` returned in another process."""

    def transformed_stream(self, x: Tensor) -> Tensor:
        """Convert hidden states of the original model to hidden states of the transformed model.

        ``x`` and the result have the shape ``[batch, tokens, channels]``.
        """
        return x


class Transform(TransformRun):
    """Changes the values of parameters so that the outputs of the float model stay the same.

    A subclass sets ``needs`` and overrides at least `apply`. If another object does the work, the subclass
    overrides `start` instead of `apply`. The transform itself only stores settings and never changes.

    If the transform also adds parts to a model, such as hooks on layers, the record of the transform names a
    ``restorer``, which adds these parts to a model that is loaded. The record also lists the transforms that
    must run before or after this transform, and those that cannot be combined with this transform
    (`quark.plugins.AlgorithmRecord`).

    Attributes:
        needs: Classes of the statistics of float layer inputs that the transform needs. If ``needs`` is
            empty, the transform needs no calibration data.
        works_by_block: Whether the transform needs only one block in memory at a time, and adds no tensors to
            a block. `apply_global` may still change, add and untie tensors outside the blocks, because a run
            calls it before it determines the layout of the checkpoint. If ``works_by_block`` is False, the
            run loads the whole model into memory.
        is_validated: Whether a run first tries the transform on copies of the blocks, because it changes the
            whole model and cannot be undone block by block. The run makes two copies of each block. The
            transform changes one of them, without `apply_global`. Later transforms, such as an equalization,
            change both. Then the run passes the output errors of both copies on held-out tokens to `accepts`.
        settings: Settings of this transform if it is one of the `alternatives` of another transform. If a run
            chooses this alternative, the run uses these settings and stores them in the checkpoint.
    """

    needs: Sequence[type[Statistic]] = ()
    works_by_block: bool = True
    is_validated: bool = False
    settings: AlgoConfig

    def resolve_for_model(self, model: nn.Module, plan: QuantPlan) -> ResolvedSettings | None:
        """Return settings that are completed for this model, for example with names of layers.

        Return None if the settings of this transform fit all models. Do not change the model. The tensors of
        the model may be on the meta device. The run uses a transform with the returned settings. When this
        method is called on that transform, it must return the same settings again.

        Raises:
            ConfigError, UnsupportedError: The settings do not fit this model.
        """
        return None

    def start(self, model: nn.Module, plan: QuantPlan) -> TransformRun:
        """Return the `TransformRun` that will change ``model``. This method must not change anything.

        By default, the method returns ``self``. ``self`` must then store no facts about the model.

        Args:
            model: The model. All its modules exist, but the tensors of a block may be on the meta device
                until the run processes the block.
            plan: The quantization of each layer. The configuration of the plan contains the settings that
                `resolve_for_model` returned.
        """
        return self

    def rounding(self) -> Rounding | None:
        """Return the rounding that a run uses if its configuration names no rounding.

        None means round-to-nearest.
        """
        return None

    def accepts(self, validation: Validation | None) -> bool:
        """Return whether a run applies the transform after it has tried the transform on copies of blocks.

        A run calls this method only if ``is_validated`` is True. By default, the result is True if the error
        decreases, or if there is no calibration data.

        Args:
            validation: Output errors of the quantized blocks without and with the transform, as means over
                blocks. None if there is no calibration data.
        """
        return validation is None or validation.is_improvement

    def alternatives(self) -> Mapping[str, Transform]:
        """Return alternative transforms, as a dictionary from name to transform.

        Each alternative makes some of the changes that this transform makes. The simplest alternative comes
        first. Reports use the names. If ``is_validated`` of an alternative is True, a run validates the
        alternative in the same way as this transform. If the errors of two alternatives differ by no more
        than the standard error, the run uses the first of the two. If no validated alternative lowers the
        error, the run uses an alternative whose ``is_validated`` is False, because the outputs do not show
        the effect of such an alternative. Each alternative has its own ``settings``.
        """
        return {}
