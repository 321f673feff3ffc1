"""The pipeline: blocks from a model, calibrated in lock-step where scales are static, rounded, handed to a sink."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from quark.algorithms import Rounding, RoundToNearest, Transform
from quark.model.attention import AttentionRow
from quark.model.blocks import Block, decoder_blocks
from quark.model.family import text_config
from quark.model.plan import PlanRow, QuantPlan
from quark.model.resolve import first_match
from quark.nn import QuantizedLayer, QuantizerModule, quantized_class
from quark.nn.experts import showing_all
from quark.numerics import QParams
from quark.pipeline.attention import quantize_attention
from quark.pipeline.batches import Call
from quark.pipeline.findings import Findings
from quark.pipeline.lockstep import LockStep, without_cache
from quark.pipeline.memory import FreedMemory
from quark.pipeline.observing import Observation, counting, expert_layers_among, observations, observing, pooled
from quark.pipeline.problems import problems
from quark.pipeline.sink import BlockSink
from quark.pipeline.solving import BlockSolver, Company
from quark.pipeline.source import BlockSource, InMemorySource
from quark.pipeline.transforming import Transforming
from quark.pipeline.two_passes import TwoPasses
from quark.specs.model import QConfig

Progress = Callable[[int, int, str], None]
"""Called after each block with: blocks done, blocks in all, the block's name."""


def run(
    model: nn.Module,
    plan: QuantPlan,
    calls: Sequence[Call],
    rounding: Rounding,
    sink: BlockSink,
    progress: Progress = lambda *_: None,
    source: BlockSource | None = None,
    *,
    two_passes: bool = False,
    transforms: Sequence[Transform] = (),
) -> Findings:
    """Quantize ``model`` by ``plan``, block by block.

    A rounding that needs no statistics leaves calibration to the float model: each sample passes each block once, and the block's weights
    are rounded when all samples have left it. One that needs some rounds each layer in the middle of that pass, so that the layers behind
    it get what the quantized model will give them. Layers outside the blocks come last, and are rounded to nearest.

    The sink has taken everything when this returns; to finish it is left to the caller.

    Args:
        model: Changed in place by the sink, and its weights by the rounding.
        plan: Made from this very model.
        calls: Calibration forwards; may be empty where nothing in the plan is static and the rounding needs nothing.
        rounding: Chooses codes.
        sink: Takes finished layers.
        progress: Told of every finished block.
        source: Has the tensors of ``model``, where that does not have them itself.
        transforms: Change each block before it is rounded, in this order; those that need statistics cost one more pass of each block.
        two_passes: Whether a rounding that needs statistics works between two plain passes of each block, for which less is held.
    """
    blocks = decoder_blocks(model, plan.architecture)
    outside = [r for r in plan.quantized if not any(b.owns(r.name) for b in blocks)]
    inside = [[r for r in plan.quantized if b.owns(r.name)] for b in blocks]
    work = _Work(model, plan, rounding, sink, source or InMemorySource(), TwoPasses if two_passes else BlockSolver, transforms)
    work.source.load(None)
    work.begin()
    if not plan.calibrated and not rounding.needs and not any(t.needs for t in transforms):
        for i, (block, rows) in enumerate(zip(blocks, inside, strict=True)):
            with work.at(block):
                work.transform(None, i, block, rows)
                work.finish(work.made(rows), [], [a for a in plan.attentions if block.owns(a.name)])
            progress(i + 1, len(blocks), block.name)
        seen_outside: list[Observation] = []
    else:
        seen_outside = observations(outside)
        _run_calibrated(model, plan, blocks, inside, seen_outside, calls, work, progress)
    work.finish(work.made(outside), seen_outside)
    sink.end_block(None)
    return work.findings


def _run_calibrated(
    model: nn.Module,
    plan: QuantPlan,
    blocks: Sequence[Block],
    inside: Sequence[list[PlanRow]],
    seen_outside: Sequence[Observation],
    calls: Sequence[Call],
    work: _Work,
    progress: Progress,
) -> None:
    with ExitStack() as stack:
        stack.enter_context(without_cache(model))
        stack.enter_context(showing_all(model, plan.config.calibrate_all_experts))
        stack.enter_context(observing(model, seen_outside))
        steps = stack.enter_context(
            LockStep(model, [b.module for b in blocks], calls, to_the_end=bool(seen_outside), with_float=work.wants_float)
        )
        steps.advance(-1)
        for i, (block, rows) in enumerate(zip(blocks, inside, strict=True)):
            attentions = [a for a in plan.attentions if block.owns(a.name)]
            seen = observations(rows, attentions)
            with work.at(block):
                work.transform(steps, i, block, rows)
                made = work.made(rows)
                with observing(model, seen), counting(model, expert_layers_among(made)) as tokens:
                    work.lead(steps, i, block, made)
                work.findings.count(tokens)
                work.finish(made, seen, attentions)
            progress(i + 1, len(blocks), block.name)


class _Work:
    """What is done to the layers of one block."""

    def __init__(
        self,
        model: nn.Module,
        plan: QuantPlan,
        rounding: Rounding,
        sink: BlockSink,
        source: BlockSource,
        solver: type[BlockSolver | TwoPasses],
        transforms: Sequence[Transform],
    ) -> None:
        self._model = model
        self._config = plan.config
        self._rounding = rounding
        self._company = Company(plan.architecture, plan.config.shared_scale_groups)
        self._sink = sink
        self.source = source
        self._solver = solver
        self._transforms = transforms
        self._architecture = plan.architecture
        self._nearest = RoundToNearest()
        self._freed = FreedMemory(1) if rounding.needs else FreedMemory()
        self.findings = Findings()
        self.wants_float = any(kind.wants_float for kind in rounding.needs)

    @contextmanager
    def at(self, block: Block) -> Iterator[None]:
        """The tensors of a block are there while the body runs; when it ends, its layers have been taken."""
        self.source.load(block)
        size = sum(p.nbytes for p in block.module.parameters())
        yield
        self._sink.end_block(block)
        self.source.release(block)
        self._freed.add(size)

    def begin(self) -> None:
        """Let transforms change what lies outside the blocks."""
        for transform in self._transforms:
            assert self._architecture is not None
            transform.outside(self._model, self._architecture)

    def transform(self, steps: LockStep | None, index: int, block: Block, rows: Sequence[PlanRow]) -> None:
        """Let transforms change a block at whose entry all forwards wait, and wait again."""
        if self._transforms:
            assert self._architecture is not None
            stage = Transforming(steps, index, block, rows, self._transforms, self._architecture, text_config(self._model))
            stage.work()
            self.findings.transformed |= stage.figures
            self.findings.idle = [place for place in self.findings.idle if place in stage.idle] if index else stage.idle

    def made(self, rows: Iterable[PlanRow]) -> dict[str, QuantizedLayer]:
        """Quantized layers, not yet rounded, by full name."""
        return {row.name: self._make(row) for row in rows}

    def lead(self, steps: LockStep, index: int, block: Block, made: Mapping[str, QuantizedLayer]) -> None:
        """Lead all forwards through a block, and round its layers on the way if the rounding wants to see their inputs."""
        if not self._rounding.needs:
            steps.advance(index)
            return
        rounded = {n: (self._model.get_submodule(n), q) for n, q in made.items() if _has_input_channels(q)}
        solver = self._solver(steps, block, rounded, self._rounding, self._company)
        solver.work(index)
        self.findings.add(solver.figures)
        self.findings.missed(n for n in rounded if n not in solver.figures)

    @torch.no_grad()
    def finish(self, made: Mapping[str, QuantizedLayer], seen: Sequence[Observation], attentions: Sequence[AttentionRow] = ()) -> None:
        """Set activation scales, round the weights that are not, hand the layers on."""
        seen = pooled(seen, shared=self._config.sync_moe_expert_input_amax)
        for item in (s for s in seen if s.layer in made):
            layer = made[item.layer]
            quantizer = layer.input_quantizer if item.slot == "input_tensors" else layer.output_quantizer
            assert quantizer is not None
            quantizer.set_qparams(item.qparams())
        settle_cache_scales(made, self._config)
        quantize_attention(self._model, made, attentions, seen)
        left = {n: layer for n, layer in made.items() if n not in self.findings.layers}
        for problem in problems(left, self._config.shared_scale_groups):
            self._nearest.round(problem)
        for layer in made.values():
            _round_bias(layer)
        self._sink.take(made)

    def _make(self, row: PlanRow) -> QuantizedLayer:
        layer = self._model.get_submodule(row.name)
        assert row.config is not None
        return quantized_class(layer).from_float(layer, row.config)


def _has_input_channels(layer: QuantizedLayer) -> bool:
    """Whether a layer multiplies its input by a matrix of codes: roundings that look at inputs are for those."""
    module = layer.weight_quantizer
    return isinstance(layer, nn.Linear) and module is not None and not module.quantizer.is_float


def settle_cache_scales(layers: Mapping[str, QuantizedLayer], config: QConfig) -> None:
    """Give keys and values of one attention the larger of their scales, unless they are to be separate, and none below the floor.

    Done here and not when a checkpoint is written, so that the model in memory computes what the checkpoint will.
    """
    patterns = [*config.kv_cache_group, *config.kv_cache_quant_config]
    siblings: dict[str, list[QuantizerModule]] = {}
    for name, layer in layers.items():
        quantizer = layer.output_quantizer
        if quantizer is not None and quantizer.scale is not None and quantizer.scale.ndim == 0 and first_match(name, patterns) is not None:
            siblings.setdefault(name if config.separate_kv_scales else name.rpartition(".")[0], []).append(quantizer)
    for members in siblings.values():
        scale = torch.stack([m.scale for m in members if m.scale is not None]).amax().clamp(min=config.min_kv_scale)
        for member in members:
            member.set_qparams(QParams(scale.clone(), member.zero_point))


def _round_bias(layer: QuantizedLayer) -> None:
    if layer.bias_quantizer is not None:
        values, qparams = layer.bias_quantizer.quantizer.round_to_nearest(layer.bias.data)  # type: ignore[arg-type]
        layer.bias = nn.Parameter(values, requires_grad=False)
        layer.bias_quantizer.set_qparams(qparams)
