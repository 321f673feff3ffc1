"""Validation of transforms of the whole model: their effect on the output error of copies of its blocks, before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import BlockContext, OutputError, Transform, ValidatedRun, ValidatedTransform, Validation, validated
from quark.calibration.batches import Call
from quark.calibration.lockstep import LockStep, current_forward, without_cache
from quark.calibration.output_error import as_rounded, configs_of, tensor_of
from quark.calibration.pause_points import tokens_of
from quark.config.architecture import Architecture
from quark.config.layer import QLayerConfig
from quark.planning.decoder_blocks import Block, decoder_blocks
from quark.planning.family import text_config
from quark.planning.plan import QuantPlan
from quark.ranks import ALONE, Ranks

__all__ = ["Arguments", "HasBlocks", "TransformValidation", "validate_transforms"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class HasBlocks(Protocol):
    """Loads the tensors of a block and releases them, as `quark.runs.source.BlockSource` does."""

    def load(self, block: Block | None) -> None:
        """Load the tensors of a block."""

    def release(self, block: Block) -> None:
        """Release the tensors of a block."""


@attrs.frozen
class TransformValidation:
    """Whether a transform of the whole model is applied, and why.

    Attributes:
        validation: The output error of blocks rounded to nearest before and after the transform, relative per token, averaged over blocks;
            None without calibration data or quantized layers in a block.
        is_accepted: Whether the transform is applied.
    """

    validation: Validation | None
    is_accepted: bool

    def metrics(self) -> dict[str, Any]:
        """Return the metrics for the calibration report; empty where nothing was compared."""
        return {} if self.validation is None else {**self.validation.metrics(), "applied": self.is_accepted}


def validate_transforms(
    model: nn.Module,
    plan: QuantPlan,
    transforms: Mapping[str, Transform],
    data: Sequence[Call],
    source: HasBlocks | None = None,
    ranks: Ranks = ALONE,
) -> dict[str, TransformValidation]:
    """Validate each `ValidatedTransform` by itself on held-out calibration tokens; the model is not changed.

    The cost is one float forward of the calls with held-out tokens, and for each block and transform the forwards of a rounded copy of the
    block. Where no token is held out, all calls are used.

    Args:
        model: The float model, with the tensors outside its blocks in memory.
        plan: The plan of the model.
        transforms: Transforms by registered name; those that are no `quark.algorithms.ValidatedTransform` are not in the result.
        data: Calibration samples; without any, each transform decides without a validation.
        source: Has the tensors of the blocks, each of which is in memory only while forwards are in it; None where the model has them.
        ranks: Share the samples, and come to the same result.
    """
    to_validate = {name: t for name, t in transforms.items() if isinstance(t, ValidatedTransform)}
    validation_of = _compare(model, plan, to_validate, data, source, ranks) if to_validate and data else {}
    return {name: TransformValidation(validation_of.get(name), t.accepts(validation_of.get(name))) for name, t in to_validate.items()}


def _compare(
    model: nn.Module,
    plan: QuantPlan,
    transforms: Mapping[str, ValidatedTransform],
    data: Sequence[Call],
    source: HasBlocks | None,
    ranks: Ranks,
) -> dict[str, Validation]:
    """Return the validation of each transform that could be compared in some block."""
    assert plan.architecture is not None  # a plan with transforms has one
    blocks = decoder_blocks(model, plan.architecture)
    calls = [call for call in data if call.held_out is not None]
    runs = {name: transform.start(model, plan) for name, transform in transforms.items()}
    comparison = _BlockComparison(runs, plan.architecture, text_config(model), held_out=bool(calls) or None, ranks=ranks)
    with ExitStack() as stack:
        stack.enter_context(without_cache(model))
        stack.enter_context(torch.no_grad())
        steps = stack.enter_context(LockStep(model, [b.module for b in blocks], calls or list(data), to_the_end=False, ranks=ranks))
        steps.advance(-1)
        for i, block in enumerate(blocks):
            if source is not None:
                source.load(block)
            passes = _advanced(steps, i, block)
            comparison.compare(block, configs_of(block.name, [r for r in plan.quantized if block.owns(r.name)]), passes)
            if source is not None:
                source.release(block)
    return comparison.validations()


@attrs.frozen(eq=False)
class _Pass:
    """One forward of a block: its call, the block's arguments, and the block's output."""

    call: Call
    arguments: Arguments
    output: Tensor


def _advanced(steps: LockStep, index: int, block: Block) -> list[_Pass]:
    """Let all forwards pass a block, and return their arguments and outputs."""
    passes: list[_Pass] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        forward = current_forward()
        assert forward is not None
        passes.append(_Pass(forward.call, (args, kwargs), tensor_of(output)))

    hook = block.module.register_forward_hook(keep, with_kwargs=True, prepend=True)
    try:
        steps.advance(index)
    finally:
        hook.remove()
    return passes


class _BlockComparison:
    """Compares each block with transformed copies of it, after all calls have passed the block.

    Args:
        runs: Runs of the transforms by name, started with the model whose blocks are copied.
        facts: Facts about the model family.
        config: The model's configuration.
        held_out: True to compare held-out tokens, None to compare all.
        ranks: Each compares the outputs of its own calls.
    """

    def __init__(self, runs: Mapping[str, ValidatedRun], facts: Architecture, config: Any, held_out: bool | None, ranks: Ranks) -> None:
        self._ranks = ranks
        self._runs = runs
        self._facts = facts
        self._config = config
        self._held_out = held_out
        self._errors: dict[str, list[tuple[OutputError, OutputError]]] = {name: [] for name in runs}

    def compare(self, block: Block, configs: Mapping[str, QLayerConfig], passes: Sequence[_Pass]) -> None:
        """Compute a block's output error with and without each transform, if any layer will be quantized and any call has passed the block.

        Calls without an image pass no block of cross-attention.
        """
        if not configs or not self._ranks.any(bool(passes)):
            return
        before = self._error(block.module, configs, passes, None)
        for name, run in self._runs.items():
            if self._ranks.any(any(_moved(one.arguments, run) is None for one in passes)):
                continue
            copied = _copy(block.module)
            run.apply(BlockContext(block.name, copied, self._facts, configs, {}, model_config=self._config))
            self._errors[name].append((before, self._error(copied, configs, passes, run)))

    def validations(self) -> dict[str, Validation]:
        """Return the validation over all blocks for each transform that was applied to a copy of any block."""
        return {name: validated([b for b, _ in errors], [a for _, a in errors]) for name, errors in self._errors.items() if errors}

    def _error(
        self, module: nn.Module, configs: Mapping[str, QLayerConfig], passes: Sequence[_Pass], run: ValidatedRun | None
    ) -> OutputError:
        """Return the output error of a block rounded to nearest; that of a transformed block in the transformed model's stream."""
        errors = []
        with as_rounded(module, configs):
            for one in passes:
                arguments = one.arguments if run is None else _moved(one.arguments, run)
                assert arguments is not None
                output = tensor_of(module(*arguments[0], **arguments[1]))
                reference = one.output if run is None else run.transformed_stream(one.output)
                both = (tokens_of(x, one.call, held_out=self._held_out) for x in (output, reference))
                errors.append(OutputError.of(*both, is_held_out=self._held_out is not None))
        return OutputError.joined([error for each in self._ranks.gather(errors) for error in each])


def _moved(arguments: Arguments, run: ValidatedRun) -> Arguments | None:
    """Return a block's arguments with the residual stream of the transformed model; None where none of them is the stream."""
    args, kwargs = arguments
    if args and isinstance(args[0], Tensor):
        return (run.transformed_stream(args[0]), *args[1:]), kwargs
    if isinstance(kwargs.get("hidden_states"), Tensor):
        return args, {**kwargs, "hidden_states": run.transformed_stream(kwargs["hidden_states"])}
    return None


def _copy(block: nn.Module) -> nn.Module:
    """Return a copy of a block; the model's configuration, which its modules refer to, is not copied."""
    shared = {id(m.config): m.config for m in block.modules() if hasattr(m, "config")}
    copied = copy.deepcopy(block, shared)
    copied.__dict__.pop("forward", None)  # the pausing forward of the run, which would call the original block
    return copied
