"""Functions that quantize a model block by block. `quantize_block` shows all steps for one block, in
order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from quark.algorithms import BranchSite, RoundToNearest
from quark.calibration.activation_scales import ActivationScales
from quark.calibration.attention import install
from quark.calibration.block_calibration import BlockCalibration
from quark.calibration.block_rounding import BlockRounding
from quark.calibration.block_transforms import BlockTransforms
from quark.calibration.block_tuning import BlockTuning
from quark.calibration.forwards import conducts_forwards, counting, without_cache
from quark.calibration.lockstep import BlockRun, LockStep
from quark.calibration.model_error import ModelError
from quark.calibration.report import CalibrationReport
from quark.calibration.round_to_nearest import round_to_nearest, rounding_tasks
from quark.calibration.rounding_validation import round_validated
from quark.calibration.two_passes import TwoPasses
from quark.errors import CheckpointError
from quark.models.hf.attention_switch import switch_attention
from quark.models.layers import QuantizedLayer, linear_weight, quantized_class
from quark.models.layers.experts import showing_all
from quark.models.plan.decoder_blocks import Block, decoder_blocks, rows_by_block
from quark.models.plan.family import text_config
from quark.models.plan.plan_row import PlanRow
from quark.plugins.attribution import attributed
from quark.plugins.catalog import catalog
from quark.plugins.measuring import ForwardsStarted, LayersRounded
from quark.runs.run import Run
from quark.runs.run_figures import size_of
from quark.runs.sink import BlockResult, BlockSink
from quark.runs.source import RunSource
from quark.runs.started_run import FinishedRun, StartedRun, finish_run, start_run


def quantize_run(run: Run, model: nn.Module, sink: BlockSink, source: RunSource | None = None) -> FinishedRun:
    """Quantize ``model``, and return the `FinishedRun`."""
    started = start_run(run, model, source)
    return finish_run(started, sink, quantize_blocks(started, sink))


@attributed("quantizing the model")
@conducts_forwards
def quantize_blocks(started: StartedRun, sink: BlockSink) -> CalibrationReport:
    """Quantize the model of a run, block by block, and return the calibration report.

    Layers outside the blocks are quantized last. They are rounded to nearest.

    Afterwards, the sink has accepted all layers. Call `quark.runs.started_run.finish_run` to finish the sink.

    Args:
        started: The run. Its model is changed in place. The tensors outside the blocks must have been loaded.
            If there are calibration calls, each rank runs some of them. If there are none, each rank
            quantizes the blocks that its sink accepts.
        sink: Accepts the finished layers.
    """
    run, model, figures = started.run, started.model, started.figures
    plan, ranks = run.plan, run.ranks
    if plan.attentions:
        switch_attention(model, [a.name for a in plan.attentions], eager=plan.config.softmax_quant_spec is not None)
    blocks = decoder_blocks(model, plan.architecture)
    rows_of = rows_by_block(blocks, plan.distinct)
    outside = [r for r in plan.distinct if not any(b.owns(r.name) for b in blocks)]
    layers = quantized_layers(started, outside)
    scales = ActivationScales(layers, (), plan.config, plan.architecture, ranks)
    finished = ranks.broadcast([sink.finished(b) for b in blocks])
    with ExitStack() as stack:
        has_forwards = bool(run.needs_data) and (scales or None in finished)
        steps = stack.enter_context(_forwards(started, blocks, scales)) if has_forwards else None
        others = ["done" if has_forwards or sink.wants(block) else "other process" for block in blocks]
        outcomes = [other if result is None else "resumed" for other, result in zip(others, finished, strict=True)]
        figures.expect(blocks, outcomes)
        for i, (block, rows, result, outcome) in enumerate(zip(blocks, rows_of, finished, outcomes, strict=True)):
            with figures.block(i, block, len(rows), outcome):
                block_run = None if steps is None else steps.at(i)
                if result is not None:
                    pass_finished_block(started, sink, block, rows, block_run, result)
                elif outcome == "done":
                    quantize_block(started, sink, block, rows, block_run)
    finish_layers(started, sink, layers, scales)
    with figures.clock.phase("write"):
        sink.end_block(None, BlockResult())
    figures.end_block(None, 0, 0, {})
    started.report.model_error = figures.model_error.figures()
    started.report.join_with(ranks, [b.name or "model" for b in blocks])
    return started.report


@contextmanager
def _forwards(started: StartedRun, blocks: Sequence[Block], scales: ActivationScales) -> Iterator[LockStep]:
    """Start the calibration forward passes, and yield them when they wait at the first block.

    ``scales`` are the activation scales of the layers outside the blocks.
    """
    run, model, figures = started.run, started.model, started.figures
    with_float = run.algorithms.streams == 2
    modules = [b.module for b in blocks]
    with ExitStack() as stack:
        stack.enter_context(without_cache(model))
        stack.enter_context(showing_all(model, run.plan.config.calibrate_all_experts))
        stack.enter_context(scales.watching(model))
        moment = ForwardsStarted(model=model, blocks=blocks, with_float=with_float, report=started.report, until_end=stack)
        catalog().measure(moment)
        if run.algorithms.is_sequential and not run.plan.attentions:
            figures.model_error = ModelError.of(model, blocks, run.data, run.plan.quantized)
        stack.enter_context(figures.model_error.watching())
        options: Any = {"to_the_end": bool(scales), "with_float": with_float, "spilled": started.spilled, "ranks": run.ranks}
        options["probed"] = figures.model_error.calls
        steps = stack.enter_context(LockStep(model, modules, run.data, **options))
        with figures.clock.phase("forward"):
            steps.advance(-1)
        yield steps


def quantize_block(started: StartedRun, sink: BlockSink, block: Block, rows: Sequence[PlanRow], block_run: BlockRun | None) -> None:
    """Quantize one block.

    Args:
        started: The run.
        sink: Accepts the finished block.
        block: The block. Its weights are float. The weights of earlier blocks are rounded.
        rows: The plan rows of the layers to quantize in the block.
        block_run: The calibration forward passes. At the start, they wait at the entry of this block. At the
            end, they wait at the entry of the next block. None if no forward passes are needed.
    """
    run, report, figures = started.run, CalibrationReport(), started.figures
    model, plan, phase = started.model, run.plan, figures.clock.phase
    with phase("load"):
        started.source.load(block)
    size = size_of(block)

    # Transforms, such as equalization and rotation, change the block. They are validated on held-out tokens.
    with figures.compared(block_run, block, rows, started.transforms), phase("transforms"):
        if started.transforms:
            transforms = BlockTransforms(block_run, block, rows, started.transforms, plan.architecture, text_config(model))
            transforms.apply()
            report.transformed |= transforms.metrics
            report.applied.update(transforms.applied)

    # Now the block is calibrated and rounded. Forward passes pause at each input group until the statistics
    # of the group are complete and its layers are rounded.
    layers = quantized_layers(started, rows)
    attentions = [a for a in plan.attentions if block.owns(a.name)]
    scales = ActivationScales(layers, attentions, plan.config, plan.architecture, run.ranks)
    rounded, inputs = set[str](), dict[str, Mapping[str, Any]]()
    with counting(model, scales.experts.among(layers) if block_run else ()) as own_tokens, phase("forward"):
        if block_run is not None and run.algorithms.is_sequential:
            calibration = _calibration(started, block, rows, layers, block_run, scales)
            calibration.work()
            calibration.add_to(report)
            rounded, inputs, figures.flops = calibration.rounded, calibration.inputs, calibration.flops
        else:
            rounded = _rounded_without_statistics(started, layers, run.chosen(rows), block_run, scales, report)
    counts = run.ranks.gather(dict(own_tokens)) if own_tokens else []
    report.tokens |= {name: sum(count[name] for count in counts) for name in own_tokens}

    # The remaining scales of activations are set, and the remaining weights are rounded to nearest.
    finish_layers(started, sink, layers, scales, block, rounded, inputs)
    passes = 0 if block_run is None else 2 if run.two_passes else 1

    # The sink ends the block. It may write the block into a file and add an entry to the journal.
    figures.end_block(block, size, passes, report.tokens)
    started.report.extend(report)
    with phase("write"):
        sink.end_block(block, BlockResult(figures.of_block(block, layers, report).to_dict(), started.learned()))
    for row in rows:
        if not row.is_kept and (quantizer := layers[row.name].weight_quantizer) is not None:
            quantizer.codes = None  # the sink has stored the codes, and a model in memory should not have its weights twice
    started.source.release(block)
    started.freed.add(size)


def pass_finished_block(
    started: StartedRun, sink: BlockSink, block: Block, rows: Sequence[PlanRow], block_run: BlockRun | None, finished: BlockResult
) -> None:
    """Run the forward passes through a block that an interrupted run has finished.

    The block is not calibrated or rounded again. The forward passes of the quantized model run through the
    finished block, which the sink reads. The forward passes of the float model run through the float block.
    If the rounding needs no statistics, all forward passes run through the float block. Transforms are
    applied to the float block again, because transformed float weights are not stored.

    Args:
        started, sink, rows: As in `quantize_block`.
        block: The block.
        block_run: As in `quantize_block`. If it is None, the block is not loaded.
        finished: The stored result of the block.
    """
    report = CalibrationReport.from_dict(finished.report)
    started.report.extend(report)
    started.figures.recall(report)
    started.recall(finished.learned)
    if block_run is None:
        return
    run, is_sequential = started.run, started.run.algorithms.is_sequential
    model, plan = started.model, run.plan
    started.source.load(block)
    size = size_of(block)
    floats = [f for f in block_run.forwards if f.is_float or not is_sequential]
    has_floats = run.ranks.any(bool(floats))
    again = [t for t in started.transforms if has_floats or not t.needs]
    with started.figures.compared(block_run, block, rows, started.transforms):
        if again:
            BlockTransforms(block_run, block, rows, again, plan.architecture, text_config(model)).apply()
    block_run.release(floats)
    if is_sequential:
        layers = quantized_layers(started, rows, is_read=True)
        attentions = [a for a in plan.attentions if block.owns(a.name)]
        scales = ActivationScales(layers, attentions, plan.config, plan.architecture, run.ranks)
        install(model, scales.inside)
        sink.accept(layers)
        sink.read(block)
    block_run.enter()
    started.source.release(block)
    started.freed.add(size)


def _calibration(
    started: StartedRun,
    block: Block,
    rows: Sequence[PlanRow],
    layers: Mapping[str, QuantizedLayer],
    block_run: BlockRun,
    scales: ActivationScales,
) -> BlockCalibration:
    """Return the `BlockCalibration` that runs the forward passes through a block and rounds the block's
    layers.
    """
    run, model, clock = started.run, started.model, started.figures.clock
    pairs = {name: (model.get_submodule(name), layer) for name, layer in layers.items()}
    tuning = None
    if started.tunings and layers:
        keeps_floats = run.algorithms.rounding_wants_float
        tuned = {row.name for row in rows if row.has_codes_to_choose}
        tuning = BlockTuning(block_run, block, pairs, tuned, started.tunings, keeps_floats=keeps_floats, clock=clock)
    kind = TwoPasses if run.two_passes else BlockRounding
    return kind(block_run, block, pairs, run.chosen(rows), started.rounding, started.input_groups, scales, started.branches, clock, tuning)


def _rounded_without_statistics(
    started: StartedRun,
    layers: Mapping[str, QuantizedLayer],
    chosen: Collection[str],
    block_run: BlockRun | None,
    scales: ActivationScales,
    report: CalibrationReport,
) -> set[str]:
    """Round the layers of a block with a rounding that needs no statistics, and return their names.

    If there are forward passes, they run through the block first, so that ranges of activations are observed.
    If the rounding is round-to-nearest, this function rounds no layer. Such layers are rounded later, when
    all scales are set.
    """
    if block_run is not None:
        with scales.watching(started.model):
            block_run.enter()
    if type(started.rounding.rounding) is RoundToNearest:
        return set()
    with started.figures.clock.phase("solve"):
        own = {name: layer for name, layer in layers.items() if name in chosen}
        with started.branches.made(own):
            metrics = round_validated(started.rounding, rounding_tasks(own, started.input_groups.siblings))
        report.layers |= {name: of_layer for name, of_layer in metrics.items() if of_layer}
        return set(own)


def quantized_layers(started: StartedRun, rows: Iterable[PlanRow], *, is_read: bool = False) -> dict[str, QuantizedLayer]:
    """Create the quantized layers of plan rows, and return them by full name.

    The layers are not in the model yet. Their weights are not rounded, and their branches are empty. A layer
    that keeps its quantization gets its codes and scales from the source of the run. If ``is_read`` is True,
    it does not get them, because the finished block will be read from the output.

    Raises:
        CheckpointError: The codes of a layer do not give the values of its dequantized weight.
    """
    layers: dict[str, QuantizedLayer] = {}
    kept = []
    for row in rows:
        layer = started.model.get_submodule(row.name)
        layers[row.name] = quantized_class(layer).from_float(layer, row.quantized_to)
        kept += [row.name] if row.is_kept and not is_read else []
        if (branching := started.run.algorithms.branching) is not None:
            branching.add_to(layers[row.name], BranchSite.of(row.name, layer, row.quantized_to), linear_weight(layer).device)
    for name, coded in (started.source.coded(kept) if kept else {}).items():
        values = layers[name].weight
        coded.put_into(layers[name], name, keeps_codes=True)
        _refuse_other_values(name, layers[name].weight, values)  # type: ignore[arg-type]
    if is_read:
        started.plan.share_codes(layers)
    return layers


def _refuse_other_values(name: str, values: Tensor, expected: Tensor) -> None:
    limits = torch.finfo(expected.dtype)
    # Two float32 products of the same code and scale may differ in the last bit. Casting them may add a
    # difference of one more bit.
    if not torch.allclose(values, expected, rtol=2 * limits.eps, atol=limits.tiny):
        raise CheckpointError(
            f"the codes of '{name}' decode to values that differ from the layer's dequantized weight by up to "
            f"{float((values - expected).abs().max())}, because the dequantizer of the checkpoint's layout assigns codes to the "
            "wrong layer. Set keep_prequantized_layers=False (--no-keep-prequantized)"
        )


@torch.no_grad()
def finish_layers(
    started: StartedRun,
    sink: BlockSink,
    layers: Mapping[str, QuantizedLayer],
    scales: ActivationScales,
    block: Block | None = None,
    rounded: Collection[str] = (),
    inputs: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> None:
    """Set missing activation scales, round the biases, and round all weights that are not rounded yet.

    Afterwards, plugins measure the layers, and the sink accepts the layers.

    Args:
        started, sink: As in `quantize_block`.
        layers: The quantized layers of ``block`` by full name.
        scales: The activation scales of the layers.
        block: The block that has the layers. None if ``layers`` are outside all blocks.
        rounded: Names of the layers whose weights have been rounded.
        inputs: Samples of layers' inputs that plugins have taken, by layer name.
    """
    with started.figures.clock.phase("solve"):
        scales.finish()
        install(started.model, scales.inside)
        shared = started.plan.sharing(layers)
        others = {n: layer for n, layer in layers.items() if n not in rounded and n not in shared}
        with started.branches.made(others):
            round_to_nearest(others, started.input_groups.siblings, defers=not sink.needs_values)
        started.plan.share_codes(layers)
        for layer in layers.values():
            if layer.bias_quantizer is not None:
                values, qparams = layer.bias_quantizer.quantizer.round_to_nearest(layer.bias.data)  # type: ignore[arg-type]
                layer.bias = nn.Parameter(values, requires_grad=False)
                layer.bias_quantizer.set_qparams(qparams)
    with started.figures.clock.phase("report"):
        name = None if block is None else block.name
        catalog().measure(LayersRounded(block=name, model=started.model, layers=layers, inputs=inputs, report=started.report))
    sink.accept(layers)
