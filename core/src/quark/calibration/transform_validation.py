"""Validation of transforms of the whole model: their effect on the output error of copies of its blocks, before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

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

__all__ = ["Arguments", "TransformValidation", "validate_transforms"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@attrs.frozen
class TransformValidation:
    """Whether a transform of the whole model is applied, and why.

    Attributes:
        validation: The error of blocks rounded to nearest before and after, each token's by its own size, the mean over blocks; None where
            there were no data, or no layer of a block is going to be quantized.
        is_accepted: Whether the transform is applied.
    """

    validation: Validation | None
    is_accepted: bool

    def metrics(self) -> dict[str, Any]:
        """Return what to report; empty where nothing was compared."""
        return {} if self.validation is None else {**self.validation.metrics(), "applied": self.is_accepted}


def validate_transforms(
    model: nn.Module, plan: QuantPlan, transforms: Mapping[str, Transform], data: Sequence[Call]
) -> dict[str, TransformValidation]:
    """Try those transforms that are to be validated, each alone, on held-out calibration tokens; nothing of the model is changed.

    Costs one float forward of the calls that have such tokens, and for each block and transform a copy of the block, rounded, and its
    forwards. Where no token is held out, all calls are used.

    Args:
        model: All its tensors are there.
        plan: Made from it.
        transforms: By their registered names; those that are no `quark.algorithms.ValidatedTransform` are not in the result.
        data: Calibration samples; without any, each transform decides without a validation.
    """
    wanted = {name: t for name, t in transforms.items() if isinstance(t, ValidatedTransform)}
    compared = _compare(model, plan, wanted, data) if wanted and data else {}
    return {name: TransformValidation(compared.get(name), t.accepts(compared.get(name))) for name, t in wanted.items()}


def _compare(
    model: nn.Module, plan: QuantPlan, transforms: Mapping[str, ValidatedTransform], data: Sequence[Call]
) -> dict[str, Validation]:
    """Return the validation of each transform that could be compared in some block."""
    assert plan.architecture is not None  # a plan with transforms has one
    blocks = decoder_blocks(model, plan.architecture)
    calls = [call for call in data if call.held_out is not None]
    runs = {name: transform.start(model, plan) for name, transform in transforms.items()}
    trial = _Trial(runs, plan.architecture, text_config(model), held_out=bool(calls) or None)
    with ExitStack() as stack:
        stack.enter_context(without_cache(model))
        stack.enter_context(torch.no_grad())
        steps = stack.enter_context(LockStep(model, [b.module for b in blocks], calls or list(data), to_the_end=False))
        steps.advance(-1)
        for i, block in enumerate(blocks):
            passes = _advanced(steps, i, block)
            trial.compare(block, configs_of(block.name, [r for r in plan.quantized if block.owns(r.name)]), passes)
    return trial.validations()


@attrs.frozen(eq=False)
class _Pass:
    """One forward of a block: its call, the block's arguments, and the block's output."""

    call: Call
    given: Arguments
    output: Tensor


def _advanced(steps: LockStep, index: int, block: Block) -> list[_Pass]:
    """Let all forwards pass a block, and return what they brought and got."""
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


class _Trial:
    """Compares each block with copies of it that transforms have changed, when all calls have passed it.

    Args:
        runs: Of the transforms, by name, started with the model whose blocks are copied.
        facts: About the family.
        config: Of the model.
        held_out: True to compare held-out tokens, None to compare all.
    """

    def __init__(self, runs: Mapping[str, ValidatedRun], facts: Architecture, config: Any, held_out: bool | None) -> None:
        self._runs = runs
        self._facts = facts
        self._config = config
        self._held_out = held_out
        self._errors: dict[str, list[tuple[OutputError, OutputError]]] = {name: [] for name in runs}

    def compare(self, block: Block, configs: Mapping[str, QLayerConfig], passes: Sequence[_Pass]) -> None:
        """Compute a block's error with and without each transform, if any of its layers is going to be quantized."""
        if not configs:
            return
        before = self._error(block.module, configs, passes, None)
        for name, run in self._runs.items():
            if any(_moved(one.given, run) is None for one in passes):
                continue
            copied = _copy(block.module)
            run.apply(BlockContext(block.name, copied, self._facts, configs, {}, model_config=self._config))
            self._errors[name].append((before, self._error(copied, configs, passes, run)))

    def validations(self) -> dict[str, Validation]:
        """Return the comparison over all blocks for each transform that was tried in any."""
        return {name: validated([b for b, _ in errors], [a for _, a in errors]) for name, errors in self._errors.items() if errors}

    def _error(
        self, module: nn.Module, configs: Mapping[str, QLayerConfig], passes: Sequence[_Pass], run: ValidatedRun | None
    ) -> OutputError:
        """Return the error of a block rounded to nearest; that of a changed block in the residual stream of the changed model."""
        outputs, wanted = [], []
        with as_rounded(module, configs):
            for one in passes:
                given = one.given if run is None else _moved(one.given, run)
                assert given is not None
                output = tensor_of(module(*given[0], **given[1]))
                outputs.append(tokens_of(output, one.call, held_out=self._held_out))
                reference = one.output if run is None else run.transformed_stream(one.output)
                wanted.append(tokens_of(reference, one.call, held_out=self._held_out))
        return OutputError.of(torch.cat(outputs), torch.cat(wanted), is_held_out=self._held_out is not None)


def _moved(given: Arguments, run: ValidatedRun) -> Arguments | None:
    """Return a block's arguments with the residual stream of the changed model; None where the stream is not found among them."""
    args, kwargs = given
    if args and isinstance(args[0], Tensor):
        return (run.transformed_stream(args[0]), *args[1:]), kwargs
    if isinstance(kwargs.get("hidden_states"), Tensor):
        return args, {**kwargs, "hidden_states": run.transformed_stream(kwargs["hidden_states"])}
    return None


def _copy(block: nn.Module) -> nn.Module:
    """Return a copy of a block; the model's configuration, which its modules refer to, is not copied."""
    shared = {id(m.config): m.config for m in block.modules() if hasattr(m, "config")}
    copied = copy.deepcopy(block, shared)
    copied.__dict__.pop("forward", None)  # that of the run, which leads to the block itself
    return copied
