"""The pipeline: blocks from a model, calibrated in lock-step where scales are static, rounded, handed to a sink."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import nn

from quark.algorithms import Rounding
from quark.model.attention import AttentionRow
from quark.model.blocks import Block, decoder_blocks
from quark.model.plan import PlanRow, QuantPlan
from quark.model.resolve import first_match
from quark.nn import QUANTIZED_TYPES, QuantizedLayer, QuantizerModule
from quark.nn.experts import showing_all
from quark.numerics import QParams
from quark.pipeline.attention import quantize_attention
from quark.pipeline.batches import Call
from quark.pipeline.lockstep import LockStep, without_cache
from quark.pipeline.observing import Observation, observations, observing, pooled
from quark.pipeline.sink import BlockSink
from quark.specs.model import QConfig

Progress = Callable[[int, int, str], None]
"""Called after each block with: blocks done, blocks in all, the block's name."""


def run(
    model: nn.Module, plan: QuantPlan, calls: Sequence[Call], rounding: Rounding, sink: BlockSink, progress: Progress = lambda *_: None
) -> None:
    """Quantize ``model`` by ``plan``, block by block.

    Activations are observed in the float model: each sample passes each block once. A block's weights are rounded when all samples have
    left it. Layers outside the blocks come last.

    Args:
        model: Changed in place by the sink, and its weights by the rounding.
        plan: Made from this very model.
        calls: Calibration forwards; may be empty where nothing in the plan is static.
        rounding: Chooses codes.
        sink: Takes finished layers.
        progress: Told of every finished block.
    """
    blocks = decoder_blocks(model, plan.architecture)
    outside = [r for r in plan.quantized if not any(b.owns(r.name) for b in blocks)]
    inside = [[r for r in plan.quantized if b.owns(r.name)] for b in blocks]
    work = _Work(model, plan, rounding, sink)
    if not plan.calibrated:
        for i, (block, rows) in enumerate(zip(blocks, inside, strict=True)):
            work.finish(rows, [], [a for a in plan.attentions if block.owns(a.name)])
            progress(i + 1, len(blocks), block.name)
        work.finish(outside, [])
    else:
        _run_calibrated(model, plan, blocks, inside, outside, calls, work, progress)
    sink.finish()


def _run_calibrated(
    model: nn.Module,
    plan: QuantPlan,
    blocks: Sequence[Block],
    inside: Sequence[list[PlanRow]],
    outside: list[PlanRow],
    calls: Sequence[Call],
    work: _Work,
    progress: Progress,
) -> None:
    seen_outside = observations(outside)
    with ExitStack() as stack:
        stack.enter_context(without_cache(model))
        stack.enter_context(showing_all(model, plan.config.calibrate_all_experts))
        stack.enter_context(observing(model, seen_outside))
        steps = stack.enter_context(LockStep(model, [b.module for b in blocks], calls, to_the_end=bool(seen_outside)))
        steps.advance(-1)
        for i, (block, rows) in enumerate(zip(blocks, inside, strict=True)):
            attentions = [a for a in plan.attentions if block.owns(a.name)]
            seen = observations(rows, attentions)
            with observing(model, seen):
                steps.advance(i)
            work.finish(rows, seen, attentions)
            progress(i + 1, len(blocks), block.name)
    work.finish(outside, seen_outside)


class _Work:
    """What is done to the layers of one block once their statistics are complete."""

    def __init__(self, model: nn.Module, plan: QuantPlan, rounding: Rounding, sink: BlockSink) -> None:
        self._model = model
        self._config = plan.config
        self._rounding = rounding
        self._sink = sink

    @torch.no_grad()
    def finish(self, rows: Iterable[PlanRow], seen: Sequence[Observation], attentions: Sequence[AttentionRow] = ()) -> None:
        """Make quantized layers, set their activation scales, round their weights, hand them on."""
        made = {row.name: self._make(row) for row in rows}
        seen = pooled(seen, shared=self._config.sync_moe_expert_input_amax)
        for item in (s for s in seen if s.layer in made):
            layer = made[item.layer]
            quantizer = layer.input_quantizer if item.slot == "input_tensors" else layer.output_quantizer
            assert quantizer is not None
            quantizer.set_qparams(item.qparams())
        settle_cache_scales(made, self._config)
        quantize_attention(self._model, made, attentions, seen)
        for group, shared in sharing(made, self._config.shared_scale_groups):
            self._rounding.round(group, shared_scale=shared)
        for layer in made.values():
            _round_bias(layer)
        self._sink.take(made)

    def _make(self, row: PlanRow) -> QuantizedLayer:
        layer = self._model.get_submodule(row.name)
        assert row.config is not None
        return QUANTIZED_TYPES[type(layer)].from_float(layer, row.config)


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


def sharing(layers: dict[str, QuantizedLayer], groups: Sequence[Sequence[str]]) -> list[tuple[list[QuantizedLayer], bool]]:
    """The layers in the sets that are rounded together: siblings named by a group of suffixes share one scale over the whole tensor."""
    left = {name: layer for name, layer in layers.items() if layer.weight_quantizer is not None}
    found: list[tuple[list[QuantizedLayer], bool]] = []
    for suffixes in groups:
        for name in [n for n in left if n.rsplit(".", 1)[-1] == suffixes[0]]:
            parent = name.removesuffix(suffixes[0])
            members = [parent + s for s in suffixes]
            if all(m in left and _has_tensor_scale(left[m]) for m in members):
                found.append(([left.pop(m) for m in members], True))
    return [*found, *(([layer], False) for layer in left.values())]


def _has_tensor_scale(layer: QuantizedLayer) -> bool:
    return layer.weight_quantizer is not None and layer.weight_quantizer.quantizer.has_tensor_scale


def _round_bias(layer: QuantizedLayer) -> None:
    if layer.bias_quantizer is not None:
        values, qparams = layer.bias_quantizer.quantizer.round_to_nearest(layer.bias.data)  # type: ignore[arg-type]
        layer.bias = nn.Parameter(values, requires_grad=False)
        layer.bias_quantizer.set_qparams(qparams)
