"""The pipeline: blocks from a model, calibrated in lock-step where scales are static, rounded, handed to a sink."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from quark.algorithms import Rounding, Transform
from quark.calibration.activation_scales import ActivationScales
from quark.calibration.attention import install
from quark.calibration.batches import Call
from quark.calibration.block_rounding import BlockRounding, round_to_nearest
from quark.calibration.block_transforms import BlockTransforms
from quark.calibration.input_groups import InputGroups
from quark.calibration.lockstep import BlockRun, LockStep, without_cache
from quark.calibration.observation import counting, expert_layers_among
from quark.calibration.report import CalibrationReport
from quark.calibration.two_passes import TwoPasses
from quark.modules import QuantizedLayer, quantized_class
from quark.modules.experts import showing_all
from quark.planning.decoder_blocks import Block, decoder_blocks
from quark.planning.family import text_config
from quark.planning.plan import PlanRow, QuantPlan
from quark.runs.memory import FreedMemory
from quark.runs.sink import BlockSink
from quark.runs.source import BlockSource, InMemorySource

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
) -> CalibrationReport:
    """Quantize ``model`` by ``plan``, block by block.

    A rounding that needs no statistics leaves calibration to the float model: each sample passes each block once, and the block's weights
    are rounded when all samples have left it. One that needs some has each layer finished in the middle of that pass, whoever rounds it,
    so that the layers behind it get what the quantized model will give them. Layers outside the blocks come last, and are rounded to
    nearest.

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
    work = _Work(model, plan, rounding, sink, source or InMemorySource(), TwoPasses if two_passes else BlockRounding, transforms)
    work.source.load(None)
    work.begin()
    if not plan.calibrated and not rounding.needs and not any(t.needs for t in transforms):
        for i, (block, rows) in enumerate(zip(blocks, inside, strict=True)):
            with work.at(block):
                work.transform(None, block, rows)
                made = work.made(rows)
                work.finish(made, work.scales(made, block))
            progress(i + 1, len(blocks), block.name)
        made = work.made(outside)
        scales = work.scales(made)
    else:
        made = work.made(outside)
        scales = work.scales(made)
        _run_calibrated(model, plan, blocks, inside, scales, calls, work, progress)
    work.finish(made, scales)
    sink.end_block(None)
    return work.report


def _run_calibrated(
    model: nn.Module,
    plan: QuantPlan,
    blocks: Sequence[Block],
    inside: Sequence[list[PlanRow]],
    scales_outside: ActivationScales,
    calls: Sequence[Call],
    work: _Work,
    progress: Progress,
) -> None:
    with ExitStack() as stack:
        stack.enter_context(without_cache(model))
        stack.enter_context(showing_all(model, plan.config.calibrate_all_experts))
        stack.enter_context(scales_outside.watching(model))
        steps = stack.enter_context(
            LockStep(model, [b.module for b in blocks], calls, to_the_end=bool(scales_outside), with_float=work.wants_float)
        )
        steps.advance(-1)
        for i, (block, rows) in enumerate(zip(blocks, inside, strict=True)):
            with work.at(block):
                block_run = steps.at(i)
                work.transform(block_run, block, rows)
                made = work.made(rows)
                scales = work.scales(made, block)
                with counting(model, expert_layers_among(made)) as tokens:
                    work.lead(block_run, block, made, scales)
                work.report.count(tokens)
                work.finish(made, scales)
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
        solver: type[BlockRounding | TwoPasses],
        transforms: Sequence[Transform],
    ) -> None:
        self._model = model
        self._plan = plan
        self._rounding = rounding
        self._input_groups = InputGroups(plan.architecture, plan.config.shared_scale_groups)
        self._sink = sink
        self.source = source
        self._solver = solver
        self._transforms = transforms
        self._architecture = plan.architecture
        self._rounded: set[str] = set()
        self._idle: list[int] | None = None
        self._freed = FreedMemory(1) if rounding.needs else FreedMemory()
        self.report = CalibrationReport()
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
            transform.apply_global(self._model, self._architecture)

    def transform(self, block_run: BlockRun | None, block: Block, rows: Sequence[PlanRow]) -> None:
        """Let transforms change a block at whose entry all forwards wait, and wait again."""
        if self._transforms:
            assert self._architecture is not None
            stage = BlockTransforms(block_run, block, rows, self._transforms, self._architecture, text_config(self._model))
            stage.apply()
            self.report.transformed |= stage.metrics
            self._idle = stage.idle if self._idle is None else [i for i in self._idle if i in stage.idle]
            self.report.idle = self._idle

    def made(self, rows: Iterable[PlanRow]) -> dict[str, QuantizedLayer]:
        """Quantized layers, not yet rounded, by full name."""
        return {row.name: self._make(row) for row in rows}

    def scales(self, made: Mapping[str, QuantizedLayer], block: Block | None = None) -> ActivationScales:
        """The scales of the activations of some layers, those of the attention of a block among them."""
        attentions = [a for a in self._plan.attentions if block is not None and block.owns(a.name)]
        return ActivationScales(made, attentions, self._plan.config, self._architecture)

    def lead(self, block_run: BlockRun, block: Block, made: Mapping[str, QuantizedLayer], scales: ActivationScales) -> None:
        """Lead all forwards through a block, and finish its layers on the way if the rounding wants to see their inputs."""
        if not self._rounding.needs:
            with scales.watching(self._model):
                block_run.enter()
            return
        layers = {n: (self._model.get_submodule(n), q) for n, q in made.items()}
        solver = self._solver(block_run, block, layers, self._rounding, self._input_groups, scales)
        solver.work()
        self._rounded |= solver.rounded
        self.report.add(solver.metrics)
        self.report.missed(n for n in made if n in solver.taken and n not in solver.metrics)

    @torch.no_grad()
    def finish(self, made: Mapping[str, QuantizedLayer], scales: ActivationScales) -> None:
        """Set the scales and round the weights that are left, hand the layers on."""
        scales.finish()
        install(self._model, scales.inside)
        round_to_nearest({n: layer for n, layer in made.items() if n not in self._rounded}, self._plan.config.shared_scale_groups)
        for layer in made.values():
            _round_bias(layer)
        self._sink.accept(made)

    def _make(self, row: PlanRow) -> QuantizedLayer:
        layer = self._model.get_submodule(row.name)
        assert row.config is not None
        return quantized_class(layer).from_float(layer, row.config)


def _round_bias(layer: QuantizedLayer) -> None:
    if layer.bias_quantizer is not None:
        values, qparams = layer.bias_quantizer.quantizer.round_to_nearest(layer.bias.data)  # type: ignore[arg-type]
        layer.bias = nn.Parameter(values, requires_grad=False)
        layer.bias_quantizer.set_qparams(qparams)
