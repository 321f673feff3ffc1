"""Validation: whether a transform of the whole model does good is seen on copies of its blocks, before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import BlockContext, OutputError, Transform, ValidatedTransform, Validation, validated
from quark.calibration.batches import Call
from quark.calibration.lockstep import LockStep, current_forward, without_cache
from quark.calibration.output_error import as_rounded, configs_of, tensor_of
from quark.calibration.pause_points import tokens_of
from quark.config.architecture import Architecture
from quark.config.layer import QLayerConfig
from quark.planning.decoder_blocks import Block, decoder_blocks
from quark.planning.family import text_config
from quark.planning.plan import QuantPlan

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@attrs.frozen
class TransformValidation:
    """What was found about one transform.

    Attributes:
        validation: What became of the error of blocks rounded to nearest, each token's by its own size, the mean over blocks.
        goes_on: Whether it is applied.
    """

    validation: Validation
    goes_on: bool

    def metrics(self) -> dict[str, Any]:
        """What there is to report."""
        return {**self.validation.metrics(), "applied": self.goes_on}


def validate_transforms(
    model: nn.Module, plan: QuantPlan, transforms: Mapping[str, Transform], data: Sequence[Call]
) -> dict[str, TransformValidation]:
    """Try those transforms that want it, each alone, on calibration tokens that are held out; nothing of the model is changed.

    Costs one forward in float of the calls that have such tokens, and for each block and transform a copy of the block, rounded, and its
    forwards. Where nothing is held out, all calls tell.

    Args:
        model: All its tensors are there.
        plan: Made from it, and attached to it.
        transforms: By their registered names.
        data: Calibration samples; without any nothing is validated.
    """
    facts = plan.architecture
    wanted = {name: t for name, t in transforms.items() if isinstance(t, ValidatedTransform)}
    if not wanted or not data or facts is None:
        return {}
    blocks = decoder_blocks(model, facts)
    for transform in wanted.values():
        transform.prepare(model, facts)
    calls = [call for call in data if call.held_out is not None]
    trial = _Trial(wanted, facts, text_config(model), held_out=bool(calls) or None)
    with ExitStack() as stack:
        stack.enter_context(without_cache(model))
        stack.enter_context(torch.no_grad())
        run = stack.enter_context(LockStep(model, [b.module for b in blocks], calls or list(data), to_the_end=False))
        run.advance(-1)
        for i, block in enumerate(blocks):
            passes = _advanced(run, i, block)
            trial.look(block, configs_of(block.name, [r for r in plan.quantized if block.owns(r.name)]), passes)
    return {name: validation_of for name in wanted if (validation_of := trial.validation_of(name)) is not None}


@attrs.frozen(eq=False)
class _Pass:
    """One forward of a block: the call it is of, the block's arguments, and what the block put out."""

    call: Call
    given: Arguments
    output: Tensor


def _advanced(run: LockStep, index: int, block: Block) -> list[_Pass]:
    """Let all forwards pass a block."""
    passes: list[_Pass] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        forward = current_forward()
        assert forward is not None
        passes.append(_Pass(forward.call, (args, kwargs), tensor_of(output)))

    hook = block.module.register_forward_hook(keep, with_kwargs=True, prepend=True)
    try:
        run.advance(index)
    finally:
        hook.remove()
    return passes


class _Trial:
    """Looks at each block when all calls have passed it.

    Args:
        transforms: By their names, prepared.
        facts: About the family.
        config: Of the model.
        held_out: True to look at tokens that are held out, None at all.
    """

    def __init__(self, transforms: Mapping[str, ValidatedTransform], facts: Architecture, config: Any, held_out: bool | None) -> None:
        self._transforms = transforms
        self._facts = facts
        self._config = config
        self._held_out = held_out
        self._errors: dict[str, list[tuple[OutputError, OutputError]]] = {name: [] for name in transforms}

    def look(self, block: Block, configs: Mapping[str, QLayerConfig], passes: Sequence[_Pass]) -> None:
        """See what each transform would do to a block's error, if any of its layers is going to be quantized."""
        if not configs:
            return
        before = self._error(block.module, configs, passes, None)
        for name, transform in self._transforms.items():
            if any(_moved(one.given, transform) is None for one in passes):
                continue
            copied = _copy(block.module)
            transform.apply(BlockContext(block.name, copied, self._facts, configs, {}, model_config=self._config))
            self._errors[name].append((before, self._error(copied, configs, passes, transform)))

    def validation_of(self, name: str) -> TransformValidation | None:
        """What was seen of a transform; None where nothing was."""
        errors = self._errors[name]
        if not errors:
            return None
        validation = validated([before for before, _ in errors], [after for _, after in errors])
        return TransformValidation(validation, self._transforms[name].accepts(validation))

    def _error(
        self, module: nn.Module, configs: Mapping[str, QLayerConfig], passes: Sequence[_Pass], transform: ValidatedTransform | None
    ) -> OutputError:
        """That of a block, rounded to nearest; of one that a transform has changed, in the residual stream that goes with it."""
        outputs, wanted = [], []
        with as_rounded(module, configs):
            for one in passes:
                given = one.given if transform is None else _moved(one.given, transform)
                assert given is not None
                output = tensor_of(module(*given[0], **given[1]))
                outputs.append(tokens_of(output, one.call, held_out=self._held_out))
                reference = one.output if transform is None else transform.transformed_stream(one.output)
                wanted.append(tokens_of(reference, one.call, held_out=self._held_out))
        return OutputError.of(torch.cat(outputs), torch.cat(wanted), is_held_out=self._held_out is not None)


def _moved(given: Arguments, transform: ValidatedTransform) -> Arguments | None:
    """A block's arguments with the residual stream as the changed model has it; None where it is not found among them."""
    args, kwargs = given
    if args and isinstance(args[0], Tensor):
        return (transform.transformed_stream(args[0]), *args[1:]), kwargs
    if isinstance(kwargs.get("hidden_states"), Tensor):
        return args, {**kwargs, "hidden_states": transform.transformed_stream(kwargs["hidden_states"])}
    return None


def _copy(block: nn.Module) -> nn.Module:
    """A block with parameters of its own; the model's configuration, which its modules refer to, is not copied."""
    shared = {id(m.config): m.config for m in block.modules() if hasattr(m, "config")}
    copied = copy.deepcopy(block, shared)
    copied.__dict__.pop("forward", None)  # that of the run, which leads to the block itself
    return copied
