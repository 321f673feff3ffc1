"""Estimate: the output, memory and time of a run, computed from its plan and the shapes of the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.base.machine import resident_bytes
from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.exporter import Exporter, ExportOptions
from quark.checkpoint.shard_layout import ShardLayout
from quark.models.plan.decoder_blocks import decoder_blocks
from quark.models.plan.family import text_config
from quark.runs.memory import LEAST_RETURNED, held_bytes
from quark.runs.run import Run, held_by_forwards
from quark.runs.skeleton import quantized_skeleton
from quark_workbench.planning.block_probe import BlockSeconds, measured_block, seconds_per_byte
from quark_workbench.planning.workload import Calibration, Workload, statistics_bytes, workload_of

__all__ = ["Estimate", "Output", "estimate", "output_of"]

_PROGRAM = "the program and its modules"
_OF_HOST = (_PROGRAM, "freed memory", "files being written")
"""Parts that are in host memory on every device."""
_ROUNDING_COPIES = 4
"""Number of float32 copies of a weight that are in memory during rounding to nearest, coding and packing."""
_SOLVER_COPIES, _FACTOR_COPIES = 6, 3
"""Float32 copies of the stacked weight and of the Hessian that a rounding with statistics holds at a time.
"""
_NAMES = {"load": "loading", "forward": "forwards", "solve": "rounding", "write": "writing"}
"""Dictionary from a phase to its name in an estimate, if the two names differ."""


@attrs.frozen
class Output:
    """The sizes of the files and tensors that an export writes.

    Attributes:
        files: Dictionary from name of file to bytes, for the files with tensors and their index.
        quantized_bits: Bits of all tensors inside layers with a quantized weight. Tensors for activations
            that are stored outside these layers do not count.
        quantized_weights: The number of weights in these layers.
        bits: Bits of all tensors.
        weights: The number of all weights of the float model.
    """

    files: Mapping[str, int]
    quantized_bits: int
    quantized_weights: int
    bits: int
    weights: int

    @property
    def bytes(self) -> int:
        """The total size of all files."""
        return sum(self.files.values())

    @property
    def bits_per_quantized_weight(self) -> float:
        """The mean number of bits for a quantized weight, including scales and zero points.

        It is 0 if no weight is quantized.
        """
        return self.quantized_bits / self.quantized_weights if self.quantized_weights else 0.0

    @property
    def bits_per_weight(self) -> float:
        """The mean number of bits for a weight, over the whole model."""
        return self.bits / self.weights if self.weights else 0.0


@attrs.frozen
class Estimate:
    """The output, the memory, the work and the time of a run.

    Attributes:
        output: The output; None for an exporter that cannot tell its tensors in advance.
        memory: Dictionary from the name of a part of the memory to its largest size in bytes. If the parts
            are largest at different times, the run never needs as much as their sum.
        work: The FLOPs of the run, as a `Workload`.
        block: The seconds of one block; None if no block was measured.
        seconds: Dictionary from the name of a part of the run to seconds, computed from the measured block.
            It is empty if no block was measured.
        is_probed: Whether a measurement was requested.
        device: Device of the run.
    """

    output: Output | None
    memory: Mapping[str, int]
    work: Workload
    block: BlockSeconds | None = None
    seconds: Mapping[str, float] = attrs.field(factory=dict)
    is_probed: bool = False
    device: str = "cpu"

    @property
    def peak_bytes(self) -> int:
        """An upper estimate of the memory of the run in bytes, on host and device together."""
        return sum(self.memory.values())

    @property
    def device_bytes(self) -> int:
        """An upper estimate of the device's memory in bytes; 0 if the device is the CPU."""
        return 0 if self.device == "cpu" else sum(size for name, size in self.memory.items() if name not in _OF_HOST)

    @property
    def memory_of_program(self) -> int:
        """The bytes of memory that this process uses before the run."""
        return self.memory.get(_PROGRAM, 0)

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate in JSON form."""
        work = {name: value for name, value in attrs.asdict(self.work, recurse=False).items() if name != "tasks"}
        output = self.output and {
            **attrs.asdict(self.output),
            "bytes": self.output.bytes,
            "bits_per_quantized_weight": self.output.bits_per_quantized_weight,
            "bits_per_weight": self.output.bits_per_weight,
        }
        return {
            "output": output,
            "memory": {**self.memory, "peak": self.peak_bytes},
            "device": {"name": self.device, "bytes": self.device_bytes},
            "work": {**work, "flops": self.work.flops},
            "seconds": {**self.seconds, "total": sum(self.seconds.values())} if self.seconds else None,
            "block": self.block and attrs.asdict(self.block),
        }


def estimate(
    model: nn.Module,
    run: Run,
    calibration: Calibration,
    exporter: Exporter,
    options: ExportOptions,
    device: torch.device,
    *,
    file: Path | None = None,
    in_memory: bool = False,
    probing: bool = True,
) -> Estimate:
    """Return the `Estimate` of a run, which may quantize a checkpoint or a model in memory.

    Args:
        model: The model of the plan, on the meta device.
        run: The run that `quark.runs.run.plan_run` returns, in the memory mode for the data
            (`quark.runs.run.Run.for_data`).
        calibration: The size of the calibration data.
        exporter: The exporter.
        options: Options of the export.
        device: Device of the run.
        file: A file of the checkpoint, with which the speed of reading is measured; None without such a file.
        in_memory: Whether the model is in memory already. Then the memory for rounded weights is additional.
        probing: Whether to measure a block to estimate the time. The measurement takes a few seconds.
    """
    content = CheckpointContent(model, run.plan.config, run.plan)
    parts = exporter.announced(content, quantized_skeleton(model, run.plan), options)
    output = None if parts is None else output_of(model, run, parts, options.max_shard_bytes)
    work = workload_of(model, run, calibration)
    is_streamed = exporter.streams and run.algorithms.works_by_block
    written = _being_written(model, parts or (), device)
    memory = _memory(model, run, calibration, work, written, is_streamed=is_streamed, in_memory=in_memory)
    block = measured_block(model, run, calibration.length, exporter, options, device) if probing else None
    seconds = {} if block is None else _seconds(model, run, calibration, block, file)
    return Estimate(output, memory, work, block, seconds, probing, str(device))


def output_of(model: nn.Module, run: Run, parts: Iterable[Mapping[str, Tensor]], max_shard_bytes: int) -> Output:
    """Return the `Output` of an export that writes the tensors in ``parts``.

    ``max_shard_bytes`` is the largest size of a file.
    """
    parts = list(parts)
    quantized = {r.name: math.prod(r.shape) for r in run.plan.quantized if r.has_quantized_weight}
    total = inside = 0
    for name, tensor in ((n, t) for part in parts for n, t in part.items()):
        total += tensor.nbytes
        owner = name.rpartition(".")[0]
        if owner in quantized or owner.rpartition(".")[0] in quantized:
            inside += tensor.nbytes
    weights = sum(p.numel() for p in model.parameters())  # tied weights count once
    return Output(ShardLayout.of(parts, max_shard_bytes).file_sizes(), 8 * inside, sum(quantized.values()), 8 * total, weights)


def _being_written(model: nn.Module, parts: Iterable[Mapping[str, Tensor]], device: torch.device) -> int:
    """Return the bytes that tensors need while they are written.

    These are the two largest parts, since one part is written while the next part is computed. On the CPU,
    tensors that the export writes unchanged need no extra memory.
    """
    own = {name: (t.shape, t.dtype) for name, t in model.state_dict().items()} if device.type == "cpu" else {}
    sizes = (sum(t.nbytes for name, t in part.items() if own.get(name) != (t.shape, t.dtype)) for part in parts)
    return sum(sorted(sizes, reverse=True)[:2])


def _memory(
    model: nn.Module, run: Run, calibration: Calibration, work: Workload, written: int, *, is_streamed: bool, in_memory: bool
) -> dict[str, int]:
    blocks = decoder_blocks(model, run.plan.architecture)
    in_blocks = {id(p) for b in blocks for p in b.module.parameters()}
    outside = sum(p.nbytes for p in model.parameters() if id(p) not in in_blocks)
    sizes = [sum(p.nbytes for p in b.module.parameters()) for b in blocks]
    largest = max((math.prod(r.shape) for r in run.plan.quantized), default=0)
    memory = {_PROGRAM: resident_bytes()}
    if in_memory:
        quantized = {r.name for r in run.plan.quantized if r.has_quantized_weight}
        memory |= {"rounded weights": sum(p.nbytes for n, p in model.named_parameters() if n.rpartition(".")[0] in quantized)}
    elif is_streamed and any(b.name for b in blocks):
        memory |= {"weights outside the blocks": outside, "one block": max(sizes, default=0), "freed memory": LEAST_RETURNED}
    else:
        memory |= {"the whole model": outside + sum(sizes)}
    memory |= {"rounding one layer": 4 * _ROUNDING_COPIES * largest, "files being written": written}
    if work.forwards:
        memory["activations"] = _activations(model, run, calibration)
    if work.tasks:
        columns = max(task.columns for task in work.tasks)
        memory["statistics"] = statistics_bytes(run.algorithms.rounding, columns)
        memory["solver"] = max(4 * (_SOLVER_COPIES * t.rows * t.columns + _FACTOR_COPIES * t.columns**2) for t in work.tasks)
        memory["solver"] = max(0, memory["solver"] - memory["rounding one layer"])  # these two do not run at the same time
    if any(t.needs for t in run.algorithms.transforms.values()):
        memory["transforms"] = max(sizes, default=0)
    return {name: size for name, size in memory.items() if size}


def _activations(model: nn.Module, run: Run, calibration: Calibration) -> int:
    """Return the bytes of the activations that all forward passes hold at the same time.

    Forward passes wait inside a block if statistics are needed, or else between two blocks.
    """
    data = calibration.calls()
    streams = run.algorithms.streams
    hidden = getattr(text_config(model), "hidden_size", None) or 0
    size = next((p.element_size() for p in model.parameters()), 4)
    waiting = 0 if run.two_passes else held_by_forwards(model, run.plan, run.algorithms, data)
    running = held_bytes(model, run.plan, calibration.length, streams)
    return max(waiting, running) + 2 * calibration.tokens * hidden * size * streams


def _seconds(model: nn.Module, run: Run, calibration: Calibration, block: BlockSeconds, file: Path | None) -> dict[str, float]:
    """Return a dictionary with the seconds of reading the checkpoint, and of each phase for all blocks.

    ``block`` has the seconds of the measured block.
    """
    in_blocks = sum(p.nbytes for b in decoder_blocks(model, run.plan.architecture) for p in b.module.parameters())
    stored = sum(p.nbytes for p in model.parameters())
    tokens = calibration.tokens if run.needs_data else 0
    seconds = {"reading": 0.0 if file is None else stored * seconds_per_byte(file)}
    seconds |= {name: value * in_blocks / block.size for name, value in block.of(tokens).items()}
    return {_NAMES.get(name, name): value for name, value in seconds.items() if value}
