"""Quantize a model block by block: `quantize_block` is what happens to one block, `quantize_blocks` goes from block to block."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Self

import attrs
import torch
from torch import nn

from quark.algorithms import Rounding, Transform
from quark.calibration.activation_scales import ActivationScales
from quark.calibration.attention import install
from quark.calibration.batches import Call
from quark.calibration.block_rounding import BlockRounding
from quark.calibration.block_transforms import BlockTransforms, StartedTransform
from quark.calibration.input_groups import InputGroups
from quark.calibration.lockstep import BlockRun, LockStep, without_cache
from quark.calibration.observation import counting
from quark.calibration.report import CalibrationReport
from quark.calibration.rounding_without_data import round_to_nearest, round_without_statistics
from quark.calibration.two_passes import TwoPasses
from quark.modules import QuantizedLayer, quantized_class
from quark.modules.experts import showing_all
from quark.planning.decoder_blocks import Block, decoder_blocks
from quark.planning.family import text_config
from quark.planning.plan import QuantPlan
from quark.planning.plan_row import PlanRow
from quark.ranks import ALONE, Ranks
from quark.runs.memory import FreedMemory
from quark.runs.sink import BlockSink
from quark.runs.source import BlockSource, InMemorySource

__all__ = ["BlockPipeline", "Progress", "finish_layers", "quantize_block", "quantize_blocks", "quantized_layers"]

Progress = Callable[[int, int, str], None]
"""Called after each block with: blocks done, blocks in all, the block's name."""


def quantize_blocks(
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
    ranks: Ranks = ALONE,
) -> CalibrationReport:
    """Quantize ``model`` by ``plan``, block by block; layers outside the blocks come last, and are rounded to nearest.

    The sink has taken everything when this returns; to finish it is left to the caller.

    Args:
        model: Changed in place by the transforms and the sink, and its weights by the rounding.
        plan: Made from this very model.
        calls: Calibration forwards; may be empty where nothing in the plan is static and no algorithm needs statistics.
        rounding: Chooses codes.
        sink: Takes finished layers.
        progress: Called after every block.
        source: Has the tensors of ``model``, where that does not have them itself.
        two_passes: Whether a rounding that needs statistics works between two passes of each block, which takes less memory.
        transforms: Change each block before it is rounded, in this order; those that need statistics cost one more pass of each block.
        ranks: The processes that share the run: each has its part of the calls. Without calls, each has the blocks that its sink wants.
    """
    blocks = decoder_blocks(model, plan.architecture)
    rows_of = [[r for r in plan.quantized if b.owns(r.name)] for b in blocks]
    outside = [r for r in plan.quantized if not any(b.owns(r.name) for b in blocks)]
    pipeline = BlockPipeline.of(model, plan, rounding, transforms, source or InMemorySource(), sink, two_passes=two_passes, ranks=ranks)
    layers = quantized_layers(model, outside)
    scales = ActivationScales(layers, (), plan.config, plan.architecture, ranks)
    with ExitStack() as stack:
        steps: LockStep | None = None
        if plan.calibrated or rounding.needs or any(t.needs for t in transforms):
            stack.enter_context(without_cache(model))
            stack.enter_context(showing_all(model, plan.config.calibrate_all_experts))
            stack.enter_context(scales.watching(model))
            with_float = any(kind.wants_float for kind in rounding.needs)
            modules = [b.module for b in blocks]
            steps = stack.enter_context(LockStep(model, modules, calls, to_the_end=bool(scales), with_float=with_float, ranks=ranks))
            steps.advance(-1)
        for i, (block, rows) in enumerate(zip(blocks, rows_of, strict=True)):
            if steps is not None or sink.wants(block):
                quantize_block(pipeline, block, rows, None if steps is None else steps.at(i))
            progress(i + 1, len(blocks), block.name)
    finish_layers(pipeline, layers, scales)
    sink.end_block(None)
    pipeline.report.join_with(ranks)
    return pipeline.report


@attrs.frozen(eq=False)
class BlockPipeline:
    """What is the same for all blocks of a run.

    Attributes:
        model: Of the plan.
        plan: What each layer gets.
        rounding: Chooses codes.
        transforms: In order, started with the model; they have changed what lies outside the blocks.
        source: Has the tensors of a block.
        sink: Takes finished layers.
        two_passes: As of `quantize_blocks`.
        ranks: The processes that share the run.
        input_groups: Learns from block to block which layers share an input.
        freed: Gives memory back to the system.
        report: What all blocks report.
    """

    model: nn.Module
    plan: QuantPlan
    rounding: Rounding
    transforms: Sequence[StartedTransform]
    source: BlockSource
    sink: BlockSink
    two_passes: bool
    ranks: Ranks
    input_groups: InputGroups
    freed: FreedMemory
    report: CalibrationReport = attrs.field(factory=CalibrationReport)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        plan: QuantPlan,
        rounding: Rounding,
        transforms: Sequence[Transform],
        source: BlockSource,
        sink: BlockSink,
        *,
        two_passes: bool,
        ranks: Ranks = ALONE,
    ) -> Self:
        """Return that of a run; tensors outside the blocks are loaded, and changed by the transforms."""
        source.load(None)
        started = [StartedTransform.of(transform, model, plan) for transform in transforms]
        for transform in started:
            transform.run.apply_global(model)
        groups = InputGroups(plan.architecture, plan.config.shared_scale_groups)
        freed = FreedMemory(1) if rounding.needs else FreedMemory()
        return cls(model, plan, rounding, started, source, sink, two_passes, ranks, groups, freed)


def quantize_block(pipeline: BlockPipeline, block: Block, rows: Sequence[PlanRow], block_run: BlockRun | None) -> None:
    """Quantize one block.

    Args:
        pipeline: What is the same for all blocks.
        block: The block: its weights are float, those of the blocks before it rounded.
        rows: Its layers that are to be quantized.
        block_run: The calibration forwards, which wait at its entry; afterwards they wait at the next block. None where none are needed.
    """
    model, plan, rounding, report = pipeline.model, pipeline.plan, pipeline.rounding, pipeline.report
    pipeline.source.load(block)
    size = sum(p.nbytes for p in block.module.parameters())

    # Transforms, such as equalization and rotation, validated on held-out tokens.
    if pipeline.transforms:
        transforms = BlockTransforms(block_run, block, rows, pipeline.transforms, plan.architecture, text_config(model))
        transforms.apply()
        report.add_transformed(transforms.metrics, transforms.applied)

    # Calibration and rounding: forwards pause at each input group until its statistics are complete and its layers are rounded.
    layers = quantized_layers(model, rows)
    attentions = [a for a in plan.attentions if block.owns(a.name)]
    scales = ActivationScales(layers, attentions, plan.config, plan.architecture, pipeline.ranks)
    rounded: set[str] = set()
    with counting(model, scales.experts.among(layers) if block_run else ()) as tokens:
        if block_run is not None and rounding.needs:
            calibrated = TwoPasses if pipeline.two_passes else BlockRounding
            pairs = {name: (model.get_submodule(name), layer) for name, layer in layers.items()}
            work = calibrated(block_run, block, pairs, rounding, pipeline.input_groups, scales)
            work.work()
            rounded = work.rounded
            report.add(work.metrics)
            report.missed(n for n in layers if n in work.taken and n not in work.metrics)
        elif block_run is not None:
            with scales.watching(model):
                block_run.enter()
    report.count(_of_all_ranks(tokens, pipeline.ranks))
    if not rounding.needs:
        rounded = round_without_statistics(rounding, block, layers, pipeline.input_groups.siblings, report)

    # Scales of activations, and weights that are rounded to nearest.
    finish_layers(pipeline, layers, scales, rounded)

    # The sink takes the block: in place, or packed into a shard.
    pipeline.sink.end_block(block)
    pipeline.source.release(block)
    pipeline.freed.add(size)


def _of_all_ranks(tokens: Mapping[str, int], ranks: Ranks) -> dict[str, int]:
    """Return the numbers of tokens that have reached layers, on all ranks together."""
    counts = ranks.gather(dict(tokens)) if tokens else []
    return {name: sum(count[name] for count in counts) for name in tokens}


def quantized_layers(model: nn.Module, rows: Iterable[PlanRow]) -> dict[str, QuantizedLayer]:
    """Return quantized layers by full name, their weights not rounded yet and not in the model yet."""
    layers: dict[str, QuantizedLayer] = {}
    for row in rows:
        layer = model.get_submodule(row.name)
        layers[row.name] = quantized_class(layer).from_float(layer, row.quantized_to)
    return layers


@torch.no_grad()
def finish_layers(
    pipeline: BlockPipeline, layers: Mapping[str, QuantizedLayer], scales: ActivationScales, rounded: Collection[str] = ()
) -> None:
    """Set the scales of activations that have none, round other weights than ``rounded``, and biases, to nearest; the sink gets all."""
    scales.finish()
    install(pipeline.model, scales.inside)
    round_to_nearest({n: layer for n, layer in layers.items() if n not in rounded}, pipeline.input_groups.siblings)
    for layer in layers.values():
        if layer.bias_quantizer is not None:
            values, qparams = layer.bias_quantizer.quantizer.round_to_nearest(layer.bias.data)  # type: ignore[arg-type]
            layer.bias = nn.Parameter(values, requires_grad=False)
            layer.bias_quantizer.set_qparams(qparams)
    pipeline.sink.accept(layers)
