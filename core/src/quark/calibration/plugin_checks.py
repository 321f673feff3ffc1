"""Checks of the results of plugin algorithms and of the model that they leave, before the run continues.

All weights from algorithms of other projects are encoded, and the layer keeps the codes for the export; of
weights from this project's algorithms a sample of rows is encoded
(`quark.plugins.attribution.Origin.is_checked_whole`). An error is raised at the layer where it happened, with
the names of the algorithm, its distribution and its version; otherwise the run would write a wrong
checkpoint.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import attrs
import torch
from torch import nn

from quark.algorithms import (
    BlockContext,
    FinishesBlocks,
    LearnsFromBlocks,
    Metrics,
    RoundedBlock,
    Rounding,
    RoundingTask,
    Statistic,
    Transform,
    TransformRun,
    Tuning,
)
from quark.base.names import folded
from quark.calibration.module_state import LayerState, differing, digests_of, has_finite_values, hooks, members
from quark.models.plan.decoder_blocks import Block
from quark.models.plan.quant_plan import QuantPlan
from quark.plugins.attribution import Origin, attributed
from quark.plugins.expected import described, lacking

__all__ = ["CheckedRounding", "CheckedTuning", "StartedTransform", "checked_metrics", "refuse_strange"]

_MEMBERS = {
    "rounding": ("needs", "applies_to", "round"),
    "transform": ("works_by_block", "needs", "start", "rounding"),
    "block_tuning": ("wants_float", "tune"),
}
_RUN_MEMBERS = ("apply_global", "apply")


def refuse_strange(algorithm: Any, kind: str, whose: Origin) -> None:
    """Check that the result of an algorithm's processor has all members that the pipeline uses.

    Args:
        algorithm: A rounding, a transform or a tuning.
        kind: ``"rounding"``, ``"transform"`` or ``"block_tuning"``, as its record says.
        whose: The plugin it comes from.

    Raises:
        PluginError: A member is missing, or ``needs`` has an element that is no concrete `Statistic` class.
    """
    if (complaint := lacking(algorithm, _MEMBERS[kind])) is not None:
        raise whose.error(f"makes {described(algorithm)}, which {complaint}: a {kind} has {', '.join(_MEMBERS[kind])}")
    if kind == "block_tuning":
        return
    needs = algorithm.needs
    if not isinstance(needs, Sequence) or isinstance(needs, str):
        raise whose.error(f"has needs={needs!r} where a sequence of statistics is wanted, such as ()")
    for need in needs:
        if not (isinstance(need, type) and issubclass(need, Statistic)):
            raise whose.error(f"needs {described(need)}, which is no subclass of quark.algorithms.Statistic")
        if inspect.isabstract(need):
            raise whose.error(f"needs the statistic {need.__name__}, which does not define {', '.join(sorted(need.__abstractmethods__))}")


@attrs.frozen(eq=False)
class CheckedRounding:
    """A rounding with checked results; errors name its plugin.

    Attributes:
        rounding: Chooses codes.
        whose: The plugin it comes from; None for the core's own, which is not checked.
    """

    rounding: Rounding
    whose: Origin | None = None

    @contextmanager
    def checks(self, task: RoundingTask) -> Iterator[None]:
        """Check the layers of a task, which the body rounds.

        Every weight is finite, on its grid and with its scales, and the layer is otherwise unchanged.

        Raises:
            PluginError: The rounding leaves a layer in a wrong state, or raised an exception.
        """
        if self.whose is None:
            yield
            return
        before = {name: LayerState.of(layer) for name, layer in task.layers.items()}
        with attributed(f"rounding {_some(task.layers)}", self.whose):
            yield
        for name, layer in task.layers.items():
            if (complaint := before[name].complaint(layer, whole=self.whose.is_checked_whole)) is not None:
                raise self.whose.error(f"has rounded '{name}', which now {complaint}")

    def metrics(self, report: Mapping[str, Metrics], task: RoundingTask) -> dict[str, dict[str, Any]]:
        """Return the metrics of each layer of a task from the ``report`` of the rounding.

        Raises:
            PluginError: The rounding reports something else.
        """
        if self.whose is not None:
            checked_metrics(report, set(task.layers), self.whose)
        return {name: dict(report.get(name, {})) for name in task.layers}


class CheckedTuning:
    """A tuning with checked results.

    The block's layers are checked as after a rounding, and its float parameters must be finite.

    Args:
        tuning: The tuning to check.
        whose: The plugin it comes from.
    """

    def __init__(self, tuning: Tuning, whose: Origin) -> None:
        self._tuning = tuning
        self._whose = whose
        self.wants_float = tuning.wants_float

    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        """Tune a block and return metrics, as `quark.algorithms.Tuning.tune`.

        Raises:
            PluginError: The tuning leaves the block in a wrong state, or raised an exception.
        """
        before = {name: LayerState.of(layer, is_tuned=True) for name, layer in block.layers.items()}
        with attributed(f"tuning '{block.name}'", self._whose):
            report = self._tuning.tune(block)
        for name, layer in block.layers.items():
            if (complaint := before[name].complaint(layer, whole=self._whose.is_checked_whole)) is not None:
                raise self._whose.error(f"has tuned '{block.name}', in which '{name}' now {complaint}")
        for name, parameter in block.parameters.items():
            if not has_finite_values(parameter):
                raise self._whose.error(f"has tuned '{block.name}', in which '{name}' now holds NaN or Inf")
        return checked_metrics(report, {"", *block.layers}, self._whose)


@attrs.define(eq=False)
class StartedTransform:
    """A transform that was started with one model, with checked results; errors name its plugin.

    All parameters must be finite and keep their names, and the model must have no additions that a checkpoint
    could not hold. A block that the transform reports as unchanged must have its earlier values.

    Attributes:
        run: Changes the blocks.
        needs: Statistics of layers' inputs.
        whose: The plugin it comes from; None for one that is not checked.
        runs_with_model: Whether the run may add hooks and modules, which a restorer puts back.
        works_by_block: Whether it may add no tensors to a block, since files are laid out before.
        has_changed_outside: Whether it has changed tensors outside the decoder blocks.
    """

    run: TransformRun
    needs: Sequence[type[Statistic]] = ()
    whose: Origin | None = None
    runs_with_model: bool = False
    works_by_block: bool = False
    has_changed_outside: bool = attrs.field(default=False, init=False)
    _blocks: set[str] | None = attrs.field(default=None, init=False)
    _not_applied: set[str] = attrs.field(factory=set, init=False)

    @classmethod
    def of(
        cls, transform: Transform, model: nn.Module, plan: QuantPlan, whose: Origin | None = None, *, runs_with_model: bool = False
    ) -> Self:
        """Start a transform.

        Raises:
            PluginError: The transform returns no run, or raised an exception.
        """
        with attributed("being started with the model", whose):
            run = transform.start(model, plan)
        if whose is not None and (complaint := lacking(run, _RUN_MEMBERS)) is not None:
            raise whose.error(f"starts {described(run)}, which {complaint}: a run of a transform has {', '.join(_RUN_MEMBERS)}")
        return cls(run, transform.needs, whose, runs_with_model, transform.works_by_block)

    def apply_global(self, model: nn.Module, blocks: Sequence[Block]) -> None:
        """Change the model outside its ``blocks``, as `quark.algorithms.TransformRun.apply_global`.

        RuntimeError on a second call.
        """
        if self._blocks is not None:
            raise RuntimeError("apply_global was called before: a run changes a model once")
        self._blocks = set()
        inside = tuple(block.prefix for block in blocks)
        before = digests_of(model, without=inside)
        with attributed("changing the model outside its blocks", self.whose):
            self.run.apply_global(model)
        self.has_changed_outside = digests_of(model, without=inside) != before

    def apply(self, block: BlockContext) -> Mapping[str, Metrics]:
        """Change a block and return metrics, as `quark.algorithms.TransformRun.apply`.

        Raises:
            PluginError: The transform leaves the block in a wrong state, or raised an exception.
            RuntimeError: `apply_global` was not called before, or the block has been changed already.
        """
        if self.whose is None:
            return self.run.apply(block)
        if self._blocks is None or block.name in self._blocks:
            reason = "apply_global was not called before" if self._blocks is None else "it has been changed already"
            raise RuntimeError(f"the block '{block.name}' cannot be changed: {reason}")
        self._blocks.add(block.name)
        return self._checked(block, self.run.apply, self.whose)

    def finish(self, block: BlockContext) -> Mapping[str, Metrics]:
        """Change a block once more, as `quark.algorithms.FinishesBlocks`.

        Nothing where the run has no such part.

        Raises:
            PluginError: As `apply`.
        """
        if not isinstance(self.run, FinishesBlocks):
            return {}
        return self.run.finish(block) if self.whose is None else self._checked(block, self.run.finish, self.whose)

    def _checked(
        self, block: BlockContext, change: Callable[[BlockContext], Mapping[str, Metrics]], whose: Origin
    ) -> Mapping[str, Metrics]:
        """Let the run change a block, and return its metrics.

        Raise PluginError if it leaves the block in a wrong state.
        """
        before, names = _BlockState.of(block.module), block.module.state_dict().keys()
        sums = digests_of(block.module)
        with attributed(f"changing '{block.name}'", whose):
            report = change(block)
        if (complaint := before.complaint(block.module, strict=not self.runs_with_model)) is not None:
            raise whose.error(f"has changed '{block.name}', in which {complaint}")
        if self.works_by_block and (added := sorted(block.module.state_dict().keys() ^ names)):
            raise whose.error(
                f"has added or removed '{added[0]}' in '{block.name}', and says works_by_block: files are laid out beforehand"
            )
        report = checked_metrics(report, None, whose)
        if not report.get(block.name, {}).get("applied", True):
            self._not_applied.add(block.name)
        if block.name in self._not_applied and (changed := [n for n, s in digests_of(block.module).items() if sums.get(n) != s]):
            raise whose.error(
                f"says applied: False of '{block.name}', in which it has changed {folded(changed)}: such a block keeps the values it had"
            )
        return report

    def learned(self) -> Any:
        """Return the knowledge of the run from blocks, as `quark.algorithms.LearnsFromBlocks.learned`.

        None where it learns nothing.
        """
        with attributed("keeping what it has learned", self.whose):
            return self.run.learned() if isinstance(self.run, LearnsFromBlocks) else None

    def recall(self, learned: Any) -> None:
        """Go on with earlier knowledge, as `quark.algorithms.LearnsFromBlocks.recall`."""
        if isinstance(self.run, LearnsFromBlocks):
            with attributed("recalling what it had learned", self.whose):
                self.run.recall(learned)


@attrs.frozen(eq=False)
class _BlockState:
    """The state of a block before a transform changes it, by the names of its modules."""

    modules: Mapping[str, nn.Module]
    members: Mapping[str, Mapping[str, tuple[str, ...]]]
    hooks: Mapping[str, tuple[Any, ...]]
    shapes: Mapping[str, tuple[torch.Size, torch.dtype]]

    @classmethod
    def of(cls, block: nn.Module) -> _BlockState:
        """Return the state of a block, whose parameters are known to be finite."""
        modules = dict(block.named_modules())
        return cls(
            modules,
            {name: members(module) for name, module in modules.items()},
            {name: hooks(module) for name, module in modules.items()},
            {name: (p.shape, p.dtype) for name, p in block.named_parameters()},
        )

    def complaint(self, block: nn.Module, *, strict: bool) -> str | None:
        """Return the error in the block, as a main clause; None where there is none.

        ``strict`` allows changes of values alone.
        """
        if strict:
            modules = dict(block.named_modules())
            if modules.keys() != self.modules.keys() or any(modules[n] is not m for n, m in self.modules.items()):
                changed = sorted({n for n in {*modules, *self.modules} if modules.get(n) is not self.modules.get(n)})
                return f"'{changed[0]}' is another module, which no checkpoint can express"
            for name, module in modules.items():
                if (complaint := differing(self.members[name], members(module))) is not None:
                    return f"'{name}' {complaint}"
                if hooks(module) != self.hooks[name]:
                    return f"'{name}' has other hooks, which no checkpoint holds: settings of such algorithms say runs_with_model()"
        for name, parameter in block.named_parameters():
            if name in self.shapes and (parameter.shape, parameter.dtype) != self.shapes[name]:
                return f"'{name}' is {parameter.dtype}{list(parameter.shape)} where {self.shapes[name][1]}{list(self.shapes[name][0])} was"
            if not has_finite_values(parameter):
                return f"'{name}' holds NaN or Inf"
        return None


def checked_metrics(report: Any, layers: set[str] | None, whose: Origin) -> Mapping[str, Metrics]:
    """Return the metrics of an algorithm, if they are a mapping of layers to mappings of JSON values.

    Args:
        report: Metrics by layer.
        layers: Layers that may be in it; None for any.
        whose: The plugin that the algorithm comes from.

    Raises:
        PluginError: It is no mapping of layers to mappings of JSON values.
    """
    if not isinstance(report, Mapping) or not all(isinstance(metrics, Mapping) for metrics in report.values()):
        raise whose.error(f"reports {described(report)} where a mapping is wanted, from names of layers to mappings of metrics")
    if layers is not None and (unknown := [name for name in report if name not in layers]):
        raise whose.error(f"reports metrics of '{unknown[0]}', which it was not given")
    try:
        json.dumps({name: dict(metrics) for name, metrics in report.items()})
    except (TypeError, ValueError) as error:
        raise whose.error(f"reports metrics that are no JSON values ({error}): give floats, integers, strings") from error
    return report


def _some(names: Iterable[str]) -> str:
    """Return the first name, and how many more there are."""
    first, *rest = names
    return f"'{first}'" + (f" and {len(rest)} more" if rest else "")
