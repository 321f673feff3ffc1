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
    """One block that a transform may change. Names of layers are relative to the block.

    Attributes:
        name: Full name of the block.
        module: The block. All its weights are float.
        architecture: Facts about the model family.
        configs: Mapping from the name of each layer that will be quantized to its configuration.
        statistics: Mapping from the name of each of these layers to the statistics of its input, which are a
            mapping from class to statistic. They contain no held-out tokens. They were collected while the
            block ran in float, on the outputs of the quantized blocks before it.
        output_error: Function that rounds the current weights of the block to nearest and returns the error
            of the block's output on held-out tokens. `quark.algorithms.validated` compares two such errors.
            None if no transform needs statistics, because there are then no forward passes.
        output: Function that returns the output of the block with its current float weights on the same
            tokens, ``[tokens, channels]``. None if ``output_error`` is None.
        model_config: Configuration of the model, or of the text part of the model. It has sizes and numbers
            of heads. None if the model has no configuration.
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
        """Return whether a hook changes the input of the layer while the model runs (`input_is_transformed`).

        If so, no scale may be moved into the layer.
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
    """A transform at work on one model. It may store facts about the model.

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
        block of the model, the run logs a warning and removes it from the plan and from the settings in the
        checkpoint.

        The run checks that a block with ``applied: False`` is unchanged, and that all parameters are finite
        and have the same shapes and dtypes as before. This method must not change modules and hooks, unless
        ``runs_with_model()`` of the settings returns True.
        """
        return {block.name: {"applied": False}}

    def finish(self, block: BlockContext) -> Mapping[str, Metrics]:
        """Change one block again, after all transforms have been applied to it.

        Return metrics as `apply` does. For example, a rotation that runs as part of the model adds its hook
        to a layer here, after other transforms have moved scale into the layer. A run calls this method of
        several transforms in reverse order. ``block`` has no statistics, because they describe the block
        before its transforms.
        """
        return {}

    def learned(self) -> Any:
        """Return facts about the blocks so far that are needed for later blocks, as a JSON value.

        If a run is resumed, transforms are not applied to finished blocks again. Instead, `recall` gets this
        value.
        """
        return None

    def recall(self, learned: Any) -> None:
        """Restore the value that `learned` returned in another process."""

    def transformed_stream(self, x: Tensor) -> Tensor:
        """Return the hidden states of the changed model that correspond to ``x [batch, tokens, channels]``.

        ``x`` are hidden states of the original model.
        """
        return x


class Transform(TransformRun):
    """Changes the values of parameters such that the outputs of the float model stay the same.

    A subclass sets ``needs`` and overrides at least `apply`. It overrides `start` instead if another object
    does the work. The transform itself only stores settings and never changes.

    If the transform adds other things to a model, such as hooks on layers, the record of the transform names
    a ``restorer`` for them. The record also says which transforms this one runs before or after, and with
    which it cannot be combined (`quark.plugins.AlgorithmRecord`).

    Attributes:
        needs: Classes of the statistics that the transform needs of the float inputs of layers. If empty, it
            needs no calibration data.
        works_by_block: Whether the transform needs only one block in memory at a time, and adds no tensors to
            a block. `apply_global` may change, add and untie tensors outside the blocks, because a run
            determines the layout of the checkpoint after it. If False, the whole model is in memory.
        is_validated: Whether a run first tries the transform on copies of the blocks, because it changes the
            whole model and cannot be undone block by block. The run makes two copies of each block. The
            transform changes one of them, without `apply_global`. Later transforms, such as an equalization,
            change both. Then the run passes the output errors of both copies on held-out tokens to `accepts`.
        settings: Settings of this transform if it is one of the `alternatives` of another. If a run chooses
            the alternative, it uses these settings, and the checkpoint stores them.
    """

    needs: Sequence[type[Statistic]] = ()
    works_by_block: bool = True
    is_validated: bool = False
    settings: AlgoConfig

    def resolve_for_model(self, model: nn.Module, plan: QuantPlan) -> ResolvedSettings | None:
        """Return the settings for this model, such as names of layers, or None if they fit all models.

        Do not change the model. Its tensors may be on the meta device. The run uses a transform with the
        returned settings. For these settings, this method must return the same settings again.

        Raises:
            ConfigError, UnsupportedError: The settings do not fit this model.
        """
        return None

    def start(self, model: nn.Module, plan: QuantPlan) -> TransformRun:
        """Return the `TransformRun` that will change ``model``. This method must not change anything.

        By default, it returns this object, which must then store no facts about the model.

        Args:
            model: The model. All its modules exist, but the tensors of a block may be on the meta device
                until the run processes the block.
            plan: The quantization of each layer. The configuration of the plan contains the settings that
                `resolve_for_model` returned.
        """
        return self

    def rounding(self) -> Rounding | None:
        """Return the rounding that a run uses if it names no rounding. None means round-to-nearest."""
        return None

    def accepts(self, validation: Validation | None) -> bool:
        """Return whether a run applies the transform after its trial. Used only if ``is_validated``.

        By default, the result is True if the error decreases, or if there are no calibration data.

        Args:
            validation: Output errors of the quantized blocks without and with the transform, as means over
                blocks. None if there are no calibration data.
        """
        return validation is None or validation.is_improvement

    def alternatives(self) -> Mapping[str, Transform]:
        """Return a dictionary from name to a transform that does a part of this one.

        The simplest comes first. The names are used in reports. A run validates an alternative with
        ``is_validated`` like this transform. If the errors of two alternatives differ by no more than the
        standard error, the run uses the first. If no alternative lowers the error, the run uses an
        alternative without ``is_validated``, because outputs do not show its effect. Each alternative has its
        own ``settings``.
        """
        return {}
