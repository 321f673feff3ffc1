"""Judging: whether a transform of the whole model does good is seen on copies of its blocks, before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import BlockAtHand, Judged, Transform
from quark.model.blocks import Block, decoder_blocks
from quark.model.plan import QuantPlan
from quark.pipeline.batches import Call
from quark.pipeline.lockstep import without_cache
from quark.pipeline.trial import as_rounded, configs_of, error_by_token, tensor_of
from quark.specs.layer import QLayerConfig

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@attrs.frozen
class Judgement:
    """What was found about one transform.

    Attributes:
        before: The relative error of blocks rounded to nearest, on a held-out sample (see `quark.pipeline.trial.error_by_token`), the mean
            over blocks, as they are.
        after: As the transform would make them.
        goes_on: Whether it is applied.
    """

    before: float
    after: float
    goes_on: bool


def judged(model: nn.Module, plan: QuantPlan, transforms: Mapping[str, Transform], data: Sequence[Call]) -> dict[str, Judgement]:
    """Try those transforms that want it, each alone, on the last of the calibration samples; nothing of the model is changed.

    Costs one forward of that sample in float, and for each block and transform a copy of the block, rounded, and its forward.

    Args:
        model: All its tensors are there.
        plan: Made from it, and attached to it.
        transforms: By their registered names.
        data: Calibration samples; without any nothing is judged.
    """
    facts = plan.architecture
    wanted = {name: t for name, t in transforms.items() if isinstance(t, Judged)}
    if not wanted or not data or facts is None:
        return {}
    blocks = decoder_blocks(model, facts)
    for transform in wanted.values():
        transform.prepare(model, facts)
    trial = _Trial(plan, wanted, data[-1])
    with ExitStack() as stack:
        stack.enter_context(without_cache(model))
        stack.enter_context(torch.no_grad())
        for block in blocks:
            stack.callback(block.module.register_forward_hook(trial.at(block), with_kwargs=True).remove)
        data[-1].run(model)
    found = {}
    for name, transform in wanted.items():
        pairs = trial.errors[name]
        if pairs:
            before, after = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
            found[name] = Judgement(before, after, transform.verdict(before, after))
    return found


class _Trial:
    """Looks at each block when it has worked on the sample.

    Attributes:
        errors: Of each block, before and after, by transform.
    """

    def __init__(self, plan: QuantPlan, transforms: Mapping[str, Judged], call: Call) -> None:
        self._plan = plan
        self._transforms = transforms
        self._call = call
        self._is_busy = False
        self.errors: dict[str, list[tuple[float, float]]] = {name: [] for name in transforms}

    def at(self, block: Block) -> Any:
        """A hook behind the block's forward."""
        configs = configs_of(block.name, [r for r in self._plan.quantized if block.owns(r.name)])

        def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if self._is_busy or not configs:
                return
            self._is_busy = True  # copies have this hook too
            try:
                self._look(block, configs, (args, kwargs), tensor_of(output))
            finally:
                self._is_busy = False

        return look

    def _look(self, block: Block, configs: Mapping[str, QLayerConfig], given: Arguments, wanted: Tensor) -> None:
        with as_rounded(block.module, configs):
            before = error_by_token(tensor_of(block.module(*given[0], **given[1])), wanted, self._call)
        for name, transform in self._transforms.items():
            moved = _moved(given, transform)
            if moved is None:
                continue
            copied = _copy(block.module)
            facts = self._plan.architecture
            assert facts is not None
            transform.apply(BlockAtHand(block.name, copied, facts, configs, {}))
            with as_rounded(copied, configs):
                after = error_by_token(tensor_of(copied(*moved[0], **moved[1])), transform.moved(wanted), self._call)
            self.errors[name].append((before, after))


def _moved(given: Arguments, transform: Judged) -> Arguments | None:
    """A block's arguments with the residual stream as the changed model has it; None where it is not found among them."""
    args, kwargs = given
    if args and isinstance(args[0], Tensor):
        return (transform.moved(args[0]), *args[1:]), kwargs
    if isinstance(kwargs.get("hidden_states"), Tensor):
        return args, {**kwargs, "hidden_states": transform.moved(kwargs["hidden_states"])}
    return None


def _copy(block: nn.Module) -> nn.Module:
    """A block with parameters of its own; the model's configuration, which its modules refer to, is not copied."""
    shared = {id(m.config): m.config for m in block.modules() if hasattr(m, "config")}
    return copy.deepcopy(block, shared)
