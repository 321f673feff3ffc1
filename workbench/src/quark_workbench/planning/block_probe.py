"""A measurement of how many seconds each phase of a run takes for one block, or for a narrower copy."""

from __future__ import annotations

import copy
import logging
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from quark.base.files import release_cached
from quark.base.log import get_logger, silenced
from quark.calibration.batches import Call
from quark.calibration.phases import PHASES
from quark.checkpoint.exporter import Exporter, ExportOptions
from quark.config.model import QConfig
from quark.errors import QuarkError
from quark.models.hf.internals import input_embeddings, output_embeddings
from quark.models.plan.decoder_blocks import Block, decoder_blocks
from quark.runs.memory import SHARE, free_bytes
from quark.runs.quantize_block import quantize_blocks
from quark.runs.run import Run, plan_run
from quark.runs.sink import CheckpointSink, InPlaceSink
from quark.runs.started_run import FinishedRun, StartedRun, finish_run, start_run
from quark_workbench.planning.narrower_models import narrower_models
from quark_workbench.planning.workload import Calibration, workload_of

__all__ = ["BlockSeconds", "measured_block", "seconds_per_byte"]

_BUDGET = 6.0
"""Time limit of a measurement, in seconds. The width of the measured copy follows from it."""
_COPIES = 8
"""Memory that a run on one block needs, such as for copies, statistics and codes ÷ size of the block."""
_LARGEST = 128 << 20
"""Largest block to measure if its class builds no narrower block, whose time would predict the duration.
"""
_READ, _SECONDS = 1 << 26, 0.5
"""Bytes of a file to read for the read speed, and the time limit."""
_VOCABULARY = 256
_BY_TOKEN = ("transforms", "forward", "statistics", "tune")
"""Phases whose time grows with the amount of data. In other phases, the two runs differ only by noise."""
_FEW, _MORE = 2, 6
"""Numbers of sequences of the two compared runs."""
_SHORTEST, _LONGEST = 128, 512


@attrs.frozen
class BlockSeconds:
    """The seconds that a run spends on one block.

    Attributes:
        fixed: Dictionary from phase (`quark.calibration.phases.PHASES`) to the seconds that do not depend on
            the number of tokens.
        per_token: Dictionary from phase to the seconds for each calibration token.
        size: Bytes of the block's float tensors.
        measured_share: Size of the measured block ÷ ``size``. It is 1 if the block itself was measured, and
            less if a copy with fewer channels, attention heads or experts was measured.
    """

    fixed: Mapping[str, float]
    per_token: Mapping[str, float]
    size: int
    measured_share: float = 1.0

    def of(self, tokens: int) -> dict[str, float]:
        """Return a dictionary from phase to seconds of one block, for ``tokens`` calibration tokens."""
        return {name: fixed + tokens * self.per_token[name] for name, fixed in self.fixed.items()}


@attrs.frozen(eq=False)
class _OneBlock:
    """A model with one block and a small vocabulary.

    Attributes:
        model: The model, on the device of the planned model.
        config: The quantization configuration for the measured run.
        size: Bytes of the block's float tensors.
        work: Dictionary from phase to two numbers. The time of a phase is assumed to be a linear combination
            of its two numbers. For a phase whose time grows with the data, they are the FLOPs of a token
            and 0. For other phases, they are the bytes of the block and 1. In the phase "solve", the number
            of columns takes the place of 1 if columns are rounded one after another.
        products: FLOPs of matrix products and factorizations in the phase "solve", which ``work`` lacks.
    """

    model: nn.Module
    config: QConfig
    size: int
    work: Mapping[str, tuple[float, float]]
    products: int

    @classmethod
    def of(cls, model: nn.Module, block: Block, config: QConfig, two_passes: bool, length: int) -> _OneBlock:
        """Return a copy of ``model`` that has only ``block``, for sequences of ``length`` tokens."""
        one = _of_one_block(model, block)
        size = sum(p.nbytes for p in block.module.parameters())
        work = workload_of(one, plan_run(one, config, carried=()).in_memory_mode(two_passes), Calibration(1, length))
        forward = work.forward / length or size  # without data, the time of transforms grows with the weights
        by_token = dict.fromkeys(_BY_TOKEN, (forward, 0.0)) | {"statistics": (work.statistics / length, 0.0)}
        columns = sum(count * task.columns for task, count in work.tasks.items())
        return cls(one, config, size, {**dict.fromkeys(PHASES, (size, 1.0)), **by_token, "solve": (size, columns or 1.0)}, work.solver)

    def fits(self, device: torch.device) -> bool:
        """Return whether the device has enough memory for a run on the block."""
        free = free_bytes(device)
        return free is None or _COPIES * self.size <= SHARE * free


def measured_block(
    model: nn.Module, run: Run, length: int, exporter: Exporter, options: ExportOptions, device: torch.device
) -> BlockSeconds | None:
    """Return the seconds that the run spends on a block, or None if the model does not run with one block.

    A block of the most frequent size is measured. First, a narrow copy predicts how long the measurement of
    this block would take. If it would take more than a few seconds, the widest copy that takes less is
    measured instead, and the result is scaled by FLOPs, bytes or columns. Measurements at two widths separate
    the time that grows with bytes from the time that grows with columns. The matrix products of column-wise
    rounding are assumed to run at the same speed as those of its statistics.

    Args:
        model: The model of the plan, which does not change. It is on the meta device, except for buffers that
            checkpoints lack.
        run: The run, in its memory mode.
        length: Number of tokens in a calibration sequence.
        exporter: The exporter. If it streams, it writes to a temporary directory.
        options: Options of the export.
        device: Device of the run.
    """
    blocks = decoder_blocks(model, run.plan.architecture)
    if not blocks or not blocks[0].name:
        return None
    used = min(max(length, _SHORTEST), _LONGEST)
    try:
        with silenced(logging.CRITICAL + 1):  # their log lines do not concern the planned model
            models = _of_all_widths(model, run, blocks, length, used)
            if len(models) == 1 and models[0].size > _LARGEST:
                return None

            def seconds(one: _OneBlock, sequences: int) -> dict[str, float]:
                return _seconds(one, run, sequences, used, exporter, options, device)

            seconds(models[-1], 1)  # the first run warms up the machine
            least = seconds(models[-1], 1) if len(models) > 1 else {}
            chosen = _widest(models, least, device)
            few, more = (seconds(chosen, count) for count in (_FEW, _MORE))
            other = models[-1]
            if chosen is other is not models[0] and models[-2].fits(device):
                other, least = models[-2], seconds(models[-2], 1)
    except (QuarkError, ValueError, RuntimeError, TypeError, AttributeError, LookupError) as error:
        # This model class does not run with one block.
        get_logger(__name__).debug(f"The time is not known, since one block does not run alone ({type(error).__name__}: {error}).")
        return None
    fixed, slopes = _line(few, more, used)
    whole = models[0]
    if chosen is not whole:
        # Products of the solver are as fast as products of statistics; the rest of "solve" scales like the
        # other phases.
        of_token = chosen.work["statistics"][0]
        rate = slopes.get("statistics", 0.0) / of_token if of_token else 0.0
        for one, times in ((chosen, fixed), (other, least)):
            times["solve"] = max(0.0, times.get("solve", 0.0) - rate * one.products)
        known = {name: [(chosen.work[name], value), (other.work[name], least.get(name, 0.0))] for name, value in fixed.items()}
        fixed = {name: _extended(whole.work[name], *known[name]) for name in fixed}
        fixed["solve"] += rate * whole.products
        slopes = {name: _extended(whole.work[name], (chosen.work[name], value)) for name, value in slopes.items()}
    return BlockSeconds(fixed, slopes, whole.size, chosen.size / whole.size)


def _line(few: Mapping[str, float], more: Mapping[str, float], length: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of each phase without data, and the seconds of each phase per token.

    They come from the times of two runs, ``few`` with `_FEW` sequences and ``more`` with `_MORE` sequences.
    """
    pairs = {name: (few.get(name, 0.0), more.get(name, 0.0)) for name in dict.fromkeys([*few, *more])}
    slopes = {name: max(0.0, b - a) / ((_MORE - _FEW) * length) if name in _BY_TOKEN else 0.0 for name, (a, b) in pairs.items()}
    return {name: max(0.0, min(pair) - _FEW * length * slopes[name]) for name, pair in pairs.items()}, slopes


def _widest(models: list[_OneBlock], times: Mapping[str, float], device: torch.device) -> _OneBlock:
    """Return the widest model whose measurement takes at most `_BUDGET` seconds, or the narrowest model.

    ``times`` has the seconds of each phase for the narrowest model with one sequence.
    """
    narrowest = models[-1]
    for one in models[:-1]:
        factors = {name: one.work[name][0] / (narrowest.work[name][0] or 1.0) for name in times}
        expected = sum(value * factors[name] * (_FEW + _MORE if name in _BY_TOKEN else 2) for name, value in times.items())
        if expected <= _BUDGET and one.fits(device):
            return one
    return narrowest


def _extended(work: tuple[float, float], *known: tuple[tuple[float, float], float]) -> float:
    """Return the seconds for an amount of work ``(x, y)``, from known seconds for one or two other amounts.

    The seconds are assumed to be ``a x + b y`` with ``a, b >= 0``, or ``a x`` if only one amount is known.

    >>> _extended((64.0, 8.0), ((8.0, 4.0), 16.0), ((1.0, 1.0), 3.0))
    80.0
    """
    (x, y), seconds = known[0]
    proportional = seconds * work[0] / x if x else seconds
    if len(known) == 1:
        return proportional
    (other_x, other_y), other_seconds = known[1]
    determinant = x * other_y - other_x * y
    if not determinant:
        return proportional
    a = (seconds * other_y - other_seconds * y) / determinant
    b = (x * other_seconds - other_x * seconds) / determinant
    if b < 0:
        return proportional
    return seconds * work[1] / y if a < 0 else a * work[0] + b * work[1]


def _of_all_widths(model: nn.Module, run: Run, blocks: list[Block], length: int, used: int) -> list[_OneBlock]:
    """Return models that have only a block of the most frequent size. The first model has the planned width.

    Each further model is narrower than the model before it.
    """
    config = attrs.evolve(run.plan.config, strict=False, spill_directory=None)
    sizes = [sum(p.nbytes for p in block.module.parameters()) for block in blocks]
    index = sizes.index(statistics.mode(sizes))
    models = [_OneBlock.of(model, blocks[index], config, run.two_passes, length)]
    try:
        for narrower in narrower_models(model, index + 1):
            block = decoder_blocks(narrower, run.plan.architecture)[index]
            models.append(_OneBlock.of(narrower, block, config, run.two_passes, used))
    except (QuarkError, ValueError, RuntimeError, TypeError, AttributeError, LookupError) as error:
        # The class or the scheme does not allow fewer channels.
        get_logger(__name__).debug(f"The time is not known, since no narrower block can be built ({type(error).__name__}: {error}).")
    return models


def seconds_per_byte(file: Path) -> float:
    """Read a file, and return the seconds that reading takes per byte.

    If the system can drop pages from its cache, the file is read from the disk.
    """
    with file.open("rb", buffering=0) as opened:
        release_cached(opened.fileno(), _READ)
        started, size = time.perf_counter(), 0
        while size < _READ and (part := opened.read(1 << 22)) and time.perf_counter() - started < _SECONDS:
            size += len(part)
        return (time.perf_counter() - started) / max(size, 1)


def _of_one_block(model: nn.Module, block: Block) -> nn.Module:
    """Return a copy of the model with one block and a small vocabulary, on the meta device."""
    container = model.get_submodule(block.name.rpartition(".")[0])
    one: Any = copy.deepcopy(model, {id(container): nn.ModuleList([copy.deepcopy(block.module)])})
    one.config.num_hidden_layers = 1
    embeddings, head = input_embeddings(one), output_embeddings(one)
    if embeddings is not None:
        width, dtype = embeddings.weight.shape[1], embeddings.weight.dtype
        one.set_input_embeddings(nn.Embedding(_VOCABULARY, width, device="meta", dtype=dtype))
    if head is not None:
        one.set_output_embeddings(nn.Linear(head.weight.shape[1], _VOCABULARY, bias=False, device="meta", dtype=head.weight.dtype))
    copied: nn.Module = one
    return copied


def _with_weights(one: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a model with random weights, on the device."""
    one = copy.deepcopy(one)
    generator = torch.Generator().manual_seed(0)
    for module in one.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            # Channels of norms are uneven, as in trained models: equalization takes longer if it has nothing
            # to equalize.
            values = values.exp() if parameter.ndim == 1 else 0.02 * values
            setattr(module, name, nn.Parameter(values.to(device, parameter.dtype), requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
    return one


def _seconds(
    one: _OneBlock, run: Run, count: int, length: int, exporter: Exporter, options: ExportOptions, device: torch.device
) -> dict[str, float]:
    """Quantize a copy of a model with ``count`` sequences of data, and return the seconds of each phase."""
    model = _with_weights(one.model, device)
    generator = torch.Generator().manual_seed(count)
    ids = [torch.randint(_VOCABULARY, (1, length), generator=generator).to(device) for _ in range(count if run.needs_data else 0)]
    own = attrs.evolve(plan_run(model, one.config, carried=()), data=[Call((x,)) for x in ids]).in_memory_mode(run.two_passes)
    began = time.perf_counter()
    started = start_run(own, model)
    before = time.perf_counter() - began
    if exporter.streams and own.algorithms.works_by_block:
        finished = _streamed(started, exporter, options)
    else:
        sink = InPlaceSink(model)
        finished = finish_run(started, sink, quantize_blocks(started, sink))
    seconds = dict(finished.report.seconds)
    if own.algorithms.transforms:
        seconds["transforms"] = seconds.get("transforms", 0.0) + before
    return seconds


def _streamed(started: StartedRun, exporter: Exporter, options: ExportOptions) -> FinishedRun:
    with tempfile.TemporaryDirectory() as directory, started.stream(exporter, Path(directory), options) as stream:
        sink = CheckpointSink(started.model, stream)
        return finish_run(started, sink, quantize_blocks(started, sink))
