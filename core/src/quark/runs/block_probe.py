"""A measurement of one block: the run itself on one small block of random weights, at two sizes of data, by phase."""

from __future__ import annotations

import copy
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from quark.base.log import get_logger, silenced
from quark.calibration.batches import Call
from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.exporter import Exporter, ExportOptions
from quark.errors import QuarkError
from quark.models.plan.decoder_blocks import Block, decoder_blocks
from quark.runs.quantize_run import quantize_started, start_run
from quark.runs.run import FinishedRun, Run, StartedRun, plan_run
from quark.runs.sink import CheckpointSink, InPlaceSink
from quark.runs.skeleton import quantized_skeleton
from quark.runs.workload import Calibration, workload_of

__all__ = ["BlockSeconds", "measured_block", "seconds_per_byte"]

_LARGEST = 128 << 20
_MOST_FLOPS = {"cpu": 1e12}
_MOST_FLOPS_OF_OTHERS = 1e14
"""Bytes of a block, and work of a run on it by type of device, beyond which it would take longer than people
wait for a plan.
"""
_READ, _SECONDS = 1 << 26, 0.5
"""Bytes of a file that are read to measure how fast that is, and how long at most."""
_VOCABULARY = 256
_BY_TOKEN = ("transforms", "forward", "statistics")
"""Phases whose time grows with the data; what others take otherwise is noise."""
_FEW, _MORE = 2, 6
"""Sequences of the two runs that are compared."""
_SHORTEST, _LONGEST = 128, 512


@attrs.frozen
class BlockSeconds:
    """What one block takes.

    Attributes:
        fixed: Seconds by phase (`quark.calibration.phases.PHASES`), without data.
        per_token: Seconds by phase for each calibration token.
        size: Bytes of the block's float tensors.
    """

    fixed: Mapping[str, float]
    per_token: Mapping[str, float]
    size: int

    def of(self, tokens: int) -> dict[str, float]:
        """Return the seconds of one block by phase."""
        return {name: fixed + tokens * self.per_token[name] for name, fixed in self.fixed.items()}


def measured_block(
    model: nn.Module, run: Run, length: int, exporter: Exporter, options: ExportOptions, device: torch.device
) -> BlockSeconds | None:
    """Return what the first block takes; None where it is too large for a measurement in a few seconds, or not like most others.

    Args:
        model: Of the plan, on the meta device but for buffers that no checkpoint holds; not changed.
        run: With its memory mode.
        length: Tokens of a calibration sequence.
        exporter: Writes the result; one that streams writes to a temporary directory here.
        options: Of the export.
        device: Where the run would work.
    """
    blocks = decoder_blocks(model, run.plan.architecture)
    sizes = [sum(p.nbytes for p in block.module.parameters()) for block in blocks]
    if not blocks or not blocks[0].name or sizes[0] > _LARGEST or 2 * sizes.count(sizes[0]) < len(sizes):
        return None
    length = min(max(length, _SHORTEST), _LONGEST)
    work = workload_of(model, run, Calibration(1 + _FEW + _MORE, length)).flops / len(blocks)
    if work > _MOST_FLOPS.get(device.type, _MOST_FLOPS_OF_OTHERS):
        return None
    try:
        with silenced(logging.CRITICAL + 1):  # what they log is not of the model that is planned
            small = _of_one_block(model, blocks[0], device)
            if small is None:
                return None
            times = [_seconds(small, run, count, length, exporter, options, device) for count in (1, _FEW, _MORE)]
    except (QuarkError, ValueError, RuntimeError, TypeError, AttributeError, LookupError) as error:
        # A model class that does not run with one block.
        get_logger(__name__).debug(f"One block cannot be run alone, for its time ({type(error).__name__}: {error}).")
        return None
    _, few, more = times  # the first run warms up
    pairs = {name: (few.get(name, 0.0), more.get(name, 0.0)) for name in dict.fromkeys([*few, *more])}
    slopes = {name: max(0.0, b - a) / ((_MORE - _FEW) * length) if name in _BY_TOKEN else 0.0 for name, (a, b) in pairs.items()}
    fixed = {name: max(0.0, min(pair) - _FEW * length * slopes[name]) for name, pair in pairs.items()}
    return BlockSeconds(fixed, slopes, sizes[0])


def seconds_per_byte(file: Path) -> float:
    """Return the seconds that reading a byte of a file takes: from the disk, where the system lets its cached pages go."""
    with file.open("rb", buffering=0) as opened:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(opened.fileno(), 0, _READ, os.POSIX_FADV_DONTNEED)
        started, size = time.perf_counter(), 0
        while size < _READ and (part := opened.read(1 << 22)) and time.perf_counter() - started < _SECONDS:
            size += len(part)
        return (time.perf_counter() - started) / max(size, 1)


def _of_one_block(model: nn.Module, block: Block, device: torch.device) -> nn.Module | None:
    """Return a copy of the model with one block, a small vocabulary and random weights; None where what else it has is large."""
    container = model.get_submodule(block.name.rpartition(".")[0])
    one: Any = copy.deepcopy(model, {id(container): nn.ModuleList([copy.deepcopy(block.module)])})
    one.config.num_hidden_layers = 1
    embeddings, head = one.get_input_embeddings(), one.get_output_embeddings()
    width, dtype = embeddings.weight.shape[1], embeddings.weight.dtype
    one.set_input_embeddings(nn.Embedding(_VOCABULARY, width, device="meta", dtype=dtype))
    if head is not None:
        one.set_output_embeddings(nn.Linear(head.weight.shape[1], _VOCABULARY, bias=False, device="meta", dtype=head.weight.dtype))
    if sum(p.nbytes for p in one.parameters()) > 2 * _LARGEST:
        return None
    generator = torch.Generator().manual_seed(0)
    for module in one.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = torch.randn(parameter.shape, generator=generator)
            # Norms of uneven channels, as models have them: an equalization that finds nothing to equalize
            # takes longer.
            values = values.exp() if parameter.ndim == 1 else 0.02 * values
            setattr(module, name, nn.Parameter(values.to(device, parameter.dtype), requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
    return one if isinstance(one, nn.Module) else None


def _seconds(
    small: nn.Module, run: Run, count: int, length: int, exporter: Exporter, options: ExportOptions, device: torch.device
) -> dict[str, float]:
    """Return the seconds by phase of a run on a copy of the model, with so many sequences."""
    model: Any = copy.deepcopy(small)
    generator = torch.Generator().manual_seed(count)
    ids = [torch.randint(_VOCABULARY, (1, length), generator=generator).to(device) for _ in range(count if run.needs_data else 0)]
    config = attrs.evolve(run.plan.config, strict=False, spill_directory=None)
    own = attrs.evolve(plan_run(model, config), data=[Call((x,)) for x in ids]).in_memory_mode(run.two_passes)
    began = time.perf_counter()
    started = start_run(own, model)
    before = time.perf_counter() - began
    if exporter.streams and own.works_by_block:
        finished = _streamed(started, exporter, options)
    else:
        finished = quantize_started(started, InPlaceSink(model))
    seconds = dict(finished.report.seconds)
    if own.algorithms.transforms:
        seconds["transforms"] = seconds.get("transforms", 0.0) + before
    return seconds


def _streamed(started: StartedRun, exporter: Exporter, options: ExportOptions) -> FinishedRun:
    content = CheckpointContent(started.model, started.plan.config, started.plan)
    with (
        tempfile.TemporaryDirectory() as directory,
        exporter.stream(content, quantized_skeleton(started.model, started.plan), Path(directory), options) as stream,
    ):
        return quantize_started(started, CheckpointSink(started.model, stream))
