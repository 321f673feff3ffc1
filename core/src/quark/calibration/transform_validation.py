"""Validation of transforms of the whole model, before the model is changed.

The effect of a transform is measured by the output error of transformed copies of the model's blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import OutputError, Transform, TransformRun, Validation, validated
from quark.base.log import silenced
from quark.base.ranks import ALONE, Ranks
from quark.calibration.batches import Call
from quark.calibration.block_transforms import BlockTransforms
from quark.calibration.forwards import Forward, conducts_forwards, without_cache
from quark.calibration.lockstep import BlockRun, LockStep
from quark.calibration.pause_points import tokens_of
from quark.calibration.plugin_checks import StartedTransform
from quark.calibration.round_to_nearest import as_rounded, configs_of, tensor_of
from quark.config.algorithm import AlgoConfig
from quark.models.plan.decoder_blocks import Block, decoder_blocks
from quark.models.plan.family import text_config
from quark.models.plan.plan_row import PlanRow
from quark.models.plan.quant_plan import QuantPlan

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_NOTHING, _WHOLE = "nothing", "all"
"""Names of the two candidates that every validation has: the model without the transform, and the model with
the whole transform.
"""


class BlockSource(Protocol):
    """An object that loads the tensors of a block into the modules of a model, and later releases the
    tensors.
    """

    def load(self, block: Block | None) -> None:
        """Load the parameters and buffers of a block. If ``block`` is None, load the tensors outside all
        blocks.
        """

    def release(self, block: Block) -> None:
        """Release the tensors of a block.

        This is called when every forward pass has left the block and the sink has accepted the block.
        """


@attrs.frozen
class TransformValidation:
    """The decision whether a transform of the whole model is applied, and the errors on which it is based.

    Attributes:
        validation: The output error of quantized blocks before and after the transform. It is the relative
            error of each token, averaged over the blocks. None if there is no calibration data or no block
            has quantized layers.
        is_accepted: Whether the transform, or the chosen part of it, is applied.
        chosen: Name of the alternative that is applied instead of the whole transform. None if the whole
            transform is chosen.
        settings: Settings of the chosen alternative.
        errors: A dictionary from the name of each alternative to its mean error.
    """

    validation: Validation | None
    is_accepted: bool
    chosen: str | None = None
    settings: AlgoConfig | None = None
    errors: Mapping[str, float] = attrs.field(factory=dict)

    def metrics(self) -> dict[str, Any]:
        """Return the metrics for the calibration report. The result is empty if nothing was compared."""
        if self.validation is None:
            return {}
        chosen = (self.chosen or _WHOLE) if self.is_accepted else _NOTHING
        alternatives = {"chosen": chosen, "errors": dict(self.errors)} if self.errors else {}
        return {**self.validation.metrics(), "applied": self.is_accepted, **alternatives}


def validate_transforms(
    model: nn.Module,
    plan: QuantPlan,
    transforms: Mapping[str, Transform],
    data: Sequence[Call],
    source: BlockSource | None = None,
    ranks: Ranks = ALONE,
    *,
    compensated: bool = False,
) -> dict[str, TransformValidation]:
    """Validate transforms and their alternatives on held-out calibration tokens, and return the decisions.

    Only transforms with the attribute ``is_validated`` are validated. The model is not changed: candidates
    change copies of its blocks. Transforms that follow the validated transform and are not validated
    themselves are also applied to all copies. They use statistics of the same tokens.

    The cost is one forward pass of the float model for each call with held-out tokens. In addition, each
    candidate transforms each block, and a rounded copy of the block is computed, unless the transform has
    measured its own error. If no token is held out, all calls are used.

    Args:
        model: The float model. The tensors outside its blocks must be in memory.
        plan: The plan of the model.
        transforms: Transforms by registered name, in order. Transforms that are not validated are not in the
            result.
        data: Calibration samples. If there are none, each transform decides without a validation.
        source: Loads the tensors of each block for the time in which forward passes are in the block. None if
            the model already has all tensors.
        ranks: The ranks that share the samples. The result is the same on all ranks.
        compensated: Whether the rounding of the run compensates its errors (see
            `quark.calibration.round_to_nearest.as_rounded`).
    """
    to_validate = {name: t for name, t in transforms.items() if t.is_validated}
    if not to_validate or not data:
        return {name: TransformValidation(None, t.accepts(None)) for name, t in to_validate.items()}
    names = list(transforms)
    candidates = [
        candidate
        for name, transform in to_validate.items()
        for candidate in _candidates(name, transform, [transforms[n] for n in names[names.index(name) + 1 :]], model, plan)
    ]
    _compare(model, plan, candidates, data, source, ranks, compensated)
    return {name: _choice([c for c in candidates if c.transform_name == name]) for name in to_validate}


@attrs.frozen(eq=False)
class _Candidate:
    """A candidate of a validation. It leaves out the transform, applies a part, or applies the whole
    transform.

    Attributes:
        transform_name: Registered name of the transform.
        name: Name of the candidate.
        transform: The transform or the part of it. None if the transform is left out.
        run: The started ``transform``. None if the transform is left out.
        started: All transforms that are applied to the candidate's blocks, in order: ``transform`` and the
            transforms that follow it.
        errors: The output error of each block.
    """

    transform_name: str
    name: str
    transform: Transform | None
    run: TransformRun | None
    started: Sequence[StartedTransform]
    errors: list[OutputError] = attrs.field(factory=list)


def _candidates(name: str, transform: Transform, behind: Sequence[Transform], model: nn.Module, plan: QuantPlan) -> Iterator[_Candidate]:
    """Yield the candidates for a transform.

    The first candidate leaves out the transform. The next ones apply a part of it. The last one applies all
    of it.
    """
    followers = [t for t in behind if not t.is_validated]
    options: dict[str, Transform | None] = {_NOTHING: None, **transform.alternatives(), _WHOLE: transform}
    for option, one in options.items():
        started = [StartedTransform.of(t, model, plan) for t in ([] if one is None else [one]) + followers]
        yield _Candidate(name, option, one, None if one is None else started[0].run, started)


def _choice(candidates: Sequence[_Candidate]) -> TransformValidation:
    """Return the decision about a transform.

    The candidates are compared in order. A candidate becomes the best candidate if its error is smaller than
    the error of the previous best candidate, and if the difference is larger than the standard error. If no
    candidate is better than the model without the transform, the result describes the part of the transform
    that needs no validation. If there is no such part, the result describes the whole transform. The
    transform then decides whether it is accepted.
    """
    nothing, whole = candidates[0], candidates[-1]
    assert whole.transform is not None
    if not nothing.errors:
        return TransformValidation(None, whole.transform.accepts(None))
    best = nothing
    for candidate in candidates[1:]:
        if validated(best.errors, candidate.errors).is_improvement:
            best = candidate
    if best.transform is None:
        best = next((c for c in candidates[1:] if c.transform is not None and not c.transform.is_validated), whole)
    assert best.transform is not None
    validation = validated(nothing.errors, best.errors)
    parts = {c.name: validated(nothing.errors, c.errors).after for c in candidates[1:]} if len(candidates) > 2 else {}
    is_accepted = best.transform.accepts(validation)
    if best is whole:
        return TransformValidation(validation, is_accepted, errors=parts)
    return TransformValidation(validation, is_accepted, best.name, best.transform.settings, parts)


@conducts_forwards
def _compare(
    model: nn.Module,
    plan: QuantPlan,
    candidates: Sequence[_Candidate],
    data: Sequence[Call],
    source: BlockSource | None,
    ranks: Ranks,
    compensated: bool,
) -> None:
    """Measure the output error of each candidate in each block, and add it to the candidate's ``errors``.

    A block is left out if it has no layer to quantize or if no call runs through it.
    """
    assert plan.architecture is not None  # a plan with transforms has one
    blocks = decoder_blocks(model, plan.architecture)
    calls = [call for call in data if call.held_out is not None] or data
    with ExitStack() as stack:
        stack.enter_context(without_cache(model))
        stack.enter_context(torch.no_grad())
        stack.enter_context(silenced())
        steps = stack.enter_context(LockStep(model, [b.module for b in blocks], calls, to_the_end=False, ranks=ranks))
        steps.advance(-1)
        for i, block in enumerate(blocks):
            if source is not None:
                source.load(block)
            rows = [row for row in plan.distinct if block.owns(row.name)]
            _BlockComparison(steps.at(i), block, rows, plan, text_config(model), compensated).compare(candidates)
            if source is not None:
                source.release(block)


class _BlockComparison:
    """Compares transformed copies of one block while the forward passes wait at the block's entry.

    Afterwards, the forward passes leave the block with the outputs of the float model.

    Args:
        block_run: The forward passes.
        block: The block. It is not changed.
        rows: The plan rows of the block's layers.
        plan: The plan of the model.
        config: The text configuration of the model.
        compensated: As in `validate_transforms`.
    """

    def __init__(self, block_run: BlockRun, block: Block, rows: Sequence[PlanRow], plan: QuantPlan, config: Any, compensated: bool) -> None:
        self._block_run = block_run
        self._block = block
        self._rows = rows
        self._plan = plan
        self._config = config
        self._compensated = compensated
        self._held_out = True if block_run.holds_out else None

    def compare(self, candidates: Sequence[_Candidate]) -> None:
        """Measure the block's output error for each candidate, and add it to the candidate's ``errors``.

        Nothing is added if no layer of the block is to be quantized or if no call runs through the block. For
        example, calls without an image skip blocks of cross-attention.
        """
        block_run, ranks = self._block_run, self._block_run.grid.ranks
        have_stream: list[bool] = []

        def see_stream(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            have_stream.append(_moved((args, kwargs), None) is not None)
            return plain(*args, **kwargs)

        with block_run.standing_in(see_stream):
            outputs = block_run.replay(lambda _, output: output, block_run.forwards)
        if configs_of(self._block.name, self._rows) and ranks.any(bool(outputs)) and not ranks.any(not all(have_stream)):
            for candidate in candidates:
                candidate.errors.append(self._error(candidate, outputs))
        block_run.leave(outputs)

    def _error(self, candidate: _Candidate, outputs: Mapping[Forward, Any]) -> OutputError:
        """Return the output error of a copy of the block. The copy is transformed and then rounded to
        nearest.

        The arguments and outputs of the copy are hidden states of the transformed model.
        """
        run, copied = candidate.run, _copy(self._block.module)

        def in_copy(_: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            arguments = _moved((args, kwargs), run)
            assert arguments is not None
            return copied.forward(*arguments[0], **arguments[1])  # hooks of the block have run

        configs = configs_of(self._block.name, self._rows)
        block, facts = Block(self._block.name, copied), self._plan.architecture
        transforms = BlockTransforms(self._block_run, block, self._rows, candidate.started, facts, self._config, is_trial=True)
        with self._block_run.standing_in(in_copy):
            transforms.apply()
            if transforms.error is not None and not (self._compensated and any(c.input_tensors is not None for c in configs.values())):
                return transforms.error
            with as_rounded(copied, configs, compensated=self._compensated):
                rounded = self._block_run.replay(self._tokens, outputs)
        errors = []
        for forward, tokens in rounded.items():
            stream = tensor_of(outputs[forward])
            reference = self._tokens(forward, stream if run is None else run.transformed_stream(stream))
            errors.append(OutputError.of(tokens, reference, is_held_out=self._held_out is not None))
        return OutputError.joined([error for each in self._block_run.grid.ranks.gather(errors) for error in each])

    def _tokens(self, forward: Forward, output: Any) -> Tensor:
        return tokens_of(tensor_of(output), forward.call, held_out=self._held_out)


def _moved(arguments: Arguments, run: TransformRun | None) -> Arguments | None:
    """Return a block's arguments, with the residual stream converted to the one of the transformed model.

    Return None if the arguments do not have a residual stream.
    """
    args, kwargs = arguments
    if args and isinstance(args[0], Tensor):
        return (args[0] if run is None else run.transformed_stream(args[0]), *args[1:]), kwargs
    stream = kwargs.get("hidden_states")
    if isinstance(stream, Tensor):
        return args, {**kwargs, "hidden_states": stream if run is None else run.transformed_stream(stream)}
    return None


def _copy(block: nn.Module) -> nn.Module:
    """Return a copy of a block. The modules of the copy refer to the same configuration of the model."""
    shared = {id(m.config): m.config for m in block.modules() if hasattr(m, "config")}
    copied = copy.deepcopy(block, shared)
    copied.__dict__.pop("forward", None)  # the method that `LockStep` has set, which would call the original block
    return copied
