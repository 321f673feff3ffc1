"""Checks of the results of plugin algorithms. A run makes these checks before it continues.

The conformance suite (quark-devkit) finds algorithms that break the rules of an interface. This module finds
errors that depend on the model and its data, which no test suite can find. It checks that weights and
parameters are finite, that weights are on their quantization grids and have scales, and that metrics can be
written. If a transform reports that it has not changed a block, the module checks that the block is
unchanged.

If the algorithm comes from another project, each weight is encoded completely, and the layer stores the codes
for the export. If it comes from this project, only a sample of rows is encoded
(`quark.plugins.attribution.Origin.is_checked_whole`). An error message names the layer, the algorithm, and
the distribution of the algorithm with its version. Without these checks, the run would write a wrong
checkpoint.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Self

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import (
    BlockContext,
    Metrics,
    RoundedBlock,
    Rounding,
    RoundingTask,
    Statistic,
    Transform,
    TransformRun,
    Tuning,
    float_weight,
)
from quark.base.finite import is_finite
from quark.base.names import folded
from quark.base.parallel import one_thread
from quark.models.layers import QuantizedLayer, QuantizerModule
from quark.models.plan.decoder_blocks import Block
from quark.models.plan.quant_plan import QuantPlan
from quark.numbers import on_grid
from quark.numbers.on_grid import grid_error, scales_error
from quark.plugins.attribution import Origin, attributed
from quark.plugins.record_fields import described

_COLUMNS, _ROWS = 509, 512
"""Number of words of 8 bytes in a row (a prime number), and number of rows in a block. A block has 2 MB, so
that it fits into a cache.
"""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")
_BASES = {"rounding": Rounding, "transform": Transform, "block_tuning": Tuning}


def refuse_strange(algorithm: Any, kind: str, whose: Origin) -> None:
    """Check that a plugin's processor has returned an algorithm of the kind that the plugin declares.

    Args:
        algorithm: The result of the processor. It should be a rounding, a transform or a tuning.
        kind: ``"rounding"``, ``"transform"`` or ``"block_tuning"``, as in the record of the plugin.
        whose: The plugin that the algorithm comes from.

    Raises:
        PluginError: The algorithm is not an instance of the base class for its kind, or its ``needs`` has an
            element that is not a concrete `Statistic` class.
    """
    _refuse_other_class(algorithm, _BASES[kind], "makes", whose)
    for need in getattr(algorithm, "needs", ()):
        if not (isinstance(need, type) and issubclass(need, Statistic)) or inspect.isabstract(need):
            raise whose.error(f"needs {described(need)}, which is not a concrete subclass of quark.algorithms.Statistic")


def _refuse_other_class(value: Any, base: type, does: str, whose: Origin) -> None:
    if not isinstance(value, base):
        raise whose.error(f"{does} {described(value)}, whose class does not derive from quark.algorithms.{base.__name__}")


@attrs.frozen(eq=False)
class CheckedRounding:
    """A rounding whose results are checked. Errors name the plugin that it comes from.

    Attributes:
        rounding: The rounding algorithm.
        whose: The plugin that the rounding comes from. None for a rounding of the core, which is not checked.
    """

    rounding: Rounding
    whose: Origin | None = None

    @contextmanager
    def checks(self, task: RoundingTask) -> Iterator[None]:
        """Check the layers of a task when the body of the ``with`` statement has ended. The body rounds the
        layers.

        Raises:
            PluginError: A layer is in a wrong state after the rounding, or the rounding raised an exception.
        """
        if self.whose is None:
            yield
            return
        with _checked_layers(task.layers, "has rounded '{}', which", self.whose), attributed(f"rounding {_some(task.layers)}", self.whose):
            yield

    def metrics(self, report: Mapping[str, Metrics], task: RoundingTask) -> dict[str, dict[str, Any]]:
        """Return the metrics of each layer of a task from the ``report`` of the rounding.

        Raises:
            PluginError: The report is not a mapping from layer names to metrics.
        """
        if self.whose is not None:
            checked_metrics(report, self.whose)
        return {name: dict(report.get(name, {})) for name in task.layers}


class CheckedTuning(Tuning):
    """A tuning whose results are checked.

    The layers of a block are checked in the same way as after a rounding. In addition, the float parameters
    of the block must be finite.

    Args:
        tuning: The tuning whose results are checked.
        whose: The plugin that the tuning comes from.
    """

    def __init__(self, tuning: Tuning, whose: Origin) -> None:
        self._tuning = tuning
        self._whose = whose
        self.wants_float = tuning.wants_float

    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        """Tune a block and return metrics, like `quark.algorithms.Tuning.tune`.

        Raises:
            PluginError: The block is in a wrong state after the tuning, or the tuning raised an exception.
        """
        does = f"has tuned '{block.name}', in which '{{}}'"
        with _checked_layers(block.layers, does, self._whose), attributed(f"tuning '{block.name}'", self._whose):
            report = self._tuning.tune(block)
        for name, parameter in block.parameters.items():
            if not _has_finite_values(parameter):
                raise self._whose.error(f"{does.format(name)} now holds NaN or Inf")
        return checked_metrics(report, self._whose)


@contextmanager
def _checked_layers(layers: Mapping[str, QuantizedLayer], does: str, whose: Origin) -> Iterator[None]:
    """Check weights, scales and codes of layers when the body of the ``with`` statement has ended.

    Error messages begin with ``does``, in which ``{}`` is replaced by the name of a layer.
    """
    forms = {name: (float_weight(layer).shape, float_weight(layer).dtype) for name, layer in layers.items()}
    yield
    for name, layer in layers.items():
        module, (shape, dtype) = layer.weight_quantizer, forms[name]
        weight: Any = layer.weight
        assert module is not None
        if not isinstance(weight, nn.Parameter) or (weight.shape, weight.dtype) != forms[name]:
            wrong: str | None = f"has a weight {weight.dtype}{list(weight.shape)} instead of a parameter {dtype}{list(shape)}"
        else:
            wrong = _grid_error(module, weight.detach(), whole=whose.is_checked_whole)
        if wrong is not None:
            raise whose.error(f"{does.format(name)} now {wrong}")


def _grid_error(module: QuantizerModule, weight: Tensor, *, whole: bool) -> str | None:
    """Return why a weight is not on the grid of its quantizer, or None if it is on the grid.

    The result is the end of a sentence that begins with the weight's name. Stored codes that do not belong to
    the weight are deleted. If ``whole`` is True, all rows are checked, and the codes of the weight are
    stored.
    """
    quantizer, qparams = module.quantizer, module.qparams
    if module.codes is not None and grid_error(quantizer, qparams, weight, module.codes, sampled=not whole) is None:
        return None
    module.codes = None
    if not whole or qparams is None:
        return grid_error(quantizer, qparams, weight, sampled=not whole)
    if (wrong := scales_error(quantizer, qparams, tuple(weight.shape))) is not None:
        return wrong
    module.codes = quantizer.codes_of(weight, qparams)
    return on_grid.off_grid(weight, quantizer.dequantize(module.codes, qparams))


@attrs.define(eq=False)
class StartedTransform:
    """A transform that was started with one model and whose results are checked.

    All parameters must be finite, and their shapes and dtypes must not change. If the transform reports that
    it has not changed a block, the values of the block must be as before. Errors name the plugin that the
    transform comes from.

    Attributes:
        run: The started transform, which changes the blocks.
        needs: Classes of the statistics of layers' inputs that the transform needs.
        whose: The plugin that the transform comes from. None for a transform that is not checked.
        works_by_block: Whether the transform can run with one block in memory at a time. Such a transform
            must not add tensors.
        has_changed_outside: Whether the transform has changed tensors outside the decoder blocks.
    """

    run: TransformRun
    needs: Sequence[type[Statistic]] = ()
    whose: Origin | None = None
    works_by_block: bool = False
    has_changed_outside: bool = attrs.field(default=False, init=False)
    _not_applied: set[str] = attrs.field(factory=set, init=False)

    @classmethod
    def of(cls, transform: Transform, model: nn.Module, plan: QuantPlan, whose: Origin | None = None) -> Self:
        """Start a transform with a model and its plan.

        Raises:
            PluginError: The transform did not return a `TransformRun`, or raised an exception.
        """
        with attributed("being started with the model", whose):
            run = transform.start(model, plan)
        if whose is not None:
            _refuse_other_class(run, TransformRun, "starts", whose)
        return cls(run, transform.needs, whose, transform.works_by_block)

    def apply_global(self, model: nn.Module, blocks: Sequence[Block]) -> None:
        """Change the model outside its ``blocks``, like `quark.algorithms.TransformRun.apply_global`."""
        inside = tuple(block.prefix for block in blocks)
        before = digests_of(model, without=inside)
        with attributed("changing the model outside its blocks", self.whose):
            self.run.apply_global(model)
        self.has_changed_outside = digests_of(model, without=inside) != before

    def apply(self, block: BlockContext) -> Mapping[str, Metrics]:
        """Change a block and return metrics, like `quark.algorithms.TransformRun.apply`.

        Raises:
            PluginError: The block is in a wrong state after the transform, or the transform raised an
                exception.
        """
        return self.run.apply(block) if self.whose is None else self._checked(block, self.run.apply, self.whose)

    def finish(self, block: BlockContext) -> Mapping[str, Metrics]:
        """Change a block once more, like `quark.algorithms.TransformRun.finish`.

        Raises:
            PluginError: The reasons are those of `apply`.
        """
        if self.whose is None or type(self.run).finish is TransformRun.finish:
            return self.run.finish(block)
        return self._checked(block, self.run.finish, self.whose)

    def _checked(
        self, block: BlockContext, change: Callable[[BlockContext], Mapping[str, Metrics]], whose: Origin
    ) -> Mapping[str, Metrics]:
        """Let the transform change a block, check the block's state, and return the metrics.

        Raises:
            PluginError: The block is in a wrong state after the change, or ``change`` raised an exception.
        """
        module, changed = block.module, f"has changed '{block.name}', in which"
        forms = {name: (p.dtype, list(p.shape)) for name, p in module.named_parameters()}
        names, sums = module.state_dict().keys(), digests_of(module)
        with attributed(f"changing '{block.name}'", whose):
            report = change(block)
        for name, parameter in module.named_parameters():
            dtype, shape = form = parameter.dtype, list(parameter.shape)
            if form != forms.get(name, form):
                raise whose.error(f"{changed} '{name}' is {dtype}{shape}, but was {forms[name][0]}{forms[name][1]} before")
            if not _has_finite_values(parameter):
                raise whose.error(f"{changed} '{name}' holds NaN or Inf")
        if self.works_by_block and (added := sorted(module.state_dict().keys() ^ names)):
            raise whose.error(
                f"has added or removed '{added[0]}' in '{block.name}', but a transform with works_by_block = True must not do that, "
                "because the layout of the files is fixed before blocks are changed. Keep the tensors, or set works_by_block = False"
            )
        report = checked_metrics(report, whose)
        if not report.get(block.name, {}).get("applied", True):
            self._not_applied.add(block.name)
        if block.name in self._not_applied and (denied := [n for n, s in digests_of(module).items() if sums.get(n) != s]):
            raise whose.error(
                f"reports \"applied\": False for '{block.name}', but has changed {folded(denied)}. Restore the values, or report "
                '"applied": True'
            )
        return report

    def learned(self) -> Any:
        """Return the facts that the transform has learned from blocks, like
        `quark.algorithms.TransformRun.learned`.
        """
        with attributed("keeping what it has learned", self.whose):
            return self.run.learned()

    def recall(self, learned: Any) -> None:
        """Restore facts that `learned` returned in an interrupted run, like
        `quark.algorithms.TransformRun.recall`.
        """
        with attributed("recalling what it had learned", self.whose):
            self.run.recall(learned)


def checked_metrics(report: Any, whose: Origin) -> Mapping[str, Metrics]:
    """Check that the metrics of an algorithm can be written into a report, and return them.

    Raises:
        PluginError: ``report`` is not a mapping from names to mappings of JSON values.
    """
    try:
        json.dumps({name: dict(metrics) for name, metrics in report.items()})
    except (AttributeError, TypeError, ValueError) as error:
        raise whose.error(
            f"reports {described(report)} instead of a mapping from layer names to mappings of metrics. Metrics must be JSON values, "
            f"such as floats, integers and strings ({error})"
        ) from error
    return report


def _some(names: Iterable[str]) -> str:
    """Return a text with the first name and the number of the other names."""
    first, *rest = names
    return f"'{first}'" + (f" and {len(rest)} more" if rest else "")


def state_of(module: nn.Module) -> tuple[Any, ...]:
    """Return the state of a module. Two states are equal if submodules, hooks and values of tensors are
    equal.
    """
    parts = tuple((name, id(part), _hooks(part)) for name, part in module.named_modules())
    return parts, digests_of(module)


def _has_finite_values(parameter: Tensor) -> bool:
    """Return whether no element is NaN or infinite. Return True for integers and for meta tensors."""
    return parameter.is_meta or not parameter.is_floating_point() or is_finite(parameter.detach())


def digests_of(module: nn.Module, *, without: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Return a dictionary from the name of each tensor of a module to a digest of its values.

    The words of a tensor are arranged in rows whose length is a prime number. The digest has the sum of each
    column for each block of rows. A change of one value changes the digest. An exchange of two channels also
    changes it, unless the channels are thousands of channels apart: only then can their distance be a
    multiple of the prime number. Each byte is read once, and the host waits for an accelerator only once.
    Meta tensors are left out.

    Args:
        module: The module.
        without: Tensors whose names begin with one of these prefixes are left out.
    """
    tensors = chain(module.named_parameters(), module.named_buffers())
    with one_thread():
        sums = {n: _column_sums(t.detach()) for n, t in tensors if not (t.is_meta or n.startswith(without))}
    values = torch.cat([each.to(next(iter(sums.values())).device) for each in sums.values()]).cpu() if sums else torch.empty(0)
    parts = values.split([len(each) for each in sums.values()])
    return {name: part.numpy().tobytes() for name, part in zip(sums, parts, strict=True)}


def _column_sums(tensor: Tensor) -> Tensor:
    """Arrange a tensor's words in blocks of rows, and return the sum of each column of each block, int64
    ``[n]``.
    """
    data = tensor.reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8 or data.data_ptr() % 8:
        data = data.clone()
    rest = len(data) % (8 * _COLUMNS)
    rows = data[: len(data) - rest].view(torch.int64).view(-1, _COLUMNS)
    last = torch.nn.functional.pad(data[len(data) - rest :], (0, -rest % 8)).view(torch.int64)
    return torch.cat([*(block.sum(0) for block in rows.split(_ROWS)), last])


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    """Return the hooks of a module with their ids: one tuple for each kind of hook."""
    return tuple(tuple((getattr(module, name, None) or {}).items()) for name in _HOOKS)
