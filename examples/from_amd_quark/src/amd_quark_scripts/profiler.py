"""The module ``quark.common.profiler`` with AMD Quark's profiler for the steps of a script.

If ``QUARK_PROFILING=1`` is set, the profiler writes the time and memory of each step to a file.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, TypeVar

import attrs
import psutil

from quark.base.machine import peak_bytes, resident_bytes

__all__ = [
    "BaseMetric",
    "CPUMemoryMbMetric",
    "CPUPeakMemoryMetric",
    "CheckpointMetric",
    "DiskReadMbMetric",
    "DiskWriteMbMetric",
    "GPUMemoryMbMetric",
    "GPUPeakMemoryMetric",
    "GlobalProfiler",
    "MetricContext",
    "PeakCacheDirDiskUsageMbMetric",
    "ProfileStep",
    "RelativeTimeMetric",
    "StepNameMetric",
    "SummaryMetric",
    "TimestampMetric",
    "TotalDiskReadMbMetric",
    "TotalDiskWriteMbMetric",
    "TotalTimeMetric",
    "profile_scope",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_MIB = 1 << 20


class ProfileStep:
    """Names of the steps in AMD Quark's scripts."""

    START = "Start"
    END = "End"
    USER_DEFINED = "User-Defined"
    MODEL_LOADED = "Model Loaded"
    FILE_TO_FILE_QUANTIZATION = "File-to-File Quantization"
    MODEL_LOADING = "Model Loading"
    DATASET_LOADING = "Dataset Loading"
    MODEL_QUANTIZATION = "Model Quantization"
    MODEL_EVALUATION = "Model Evaluation"
    ADVANCED_ALGORITHMS = "Advanced Algorithms"
    CALIBRATION_WEIGHTS = "Calibration (Weights)"
    CALIBRATION_FORWARD = "Calibration (Forward)"
    FREEZE_MODEL = "Freeze Model"
    MODEL_PREPARATION = "Model Preparation"
    EXPORT_HF_SAFETENSORS = "Export HF Safetensors"
    EXPORT_ONNX = "Export ONNX"
    EXPORT_GGUF = "Export GGUF"
    PRE_PROCESS = "Pre-process"
    CALIBRATION = "Calibration"
    QUANTIZATION_MATMUL_NBITS = "Quantization (MatMulNBits)"
    QUANTIZATION_STATIC = "Quantization (Static)"
    QUANTIZATION_DYNAMIC = "Quantization (Dynamic)"
    POST_PROCESS = "Post-process"
    FAST_FINETUNE = "Fast Finetune"
    MODEL_CACHING = "Model Caching"
    FLOAT_MODEL_VALIDATION = "Float Model Validation"


@attrs.frozen(kw_only=True)
class MetricContext:
    """Measurements for metrics: times in seconds since the epoch, sizes in bytes.

    Attributes:
        start_time: Start of profiling.
        end_time: End of profiling. It is set only in summaries.
        base_memory: Memory of the process at the start.
        step_name: Beginning or end of a step, such as ``"Model Loading Start"``. None in summaries.
        current_time: Time of the measurement.
        current_memory: Memory of the process.
        gpu_available: Whether there is a GPU and torch is imported.
        gpu_current_memory: Memory that torch has allocated on the GPU.
        gpu_peak_memory: Peak of the memory that torch has allocated on the GPU. It is used only in summaries.
        disk_io_available: Whether the system counts the bytes that a process reads and writes.
        baseline_disk_read_bytes: Bytes read before profiling.
        baseline_disk_write_bytes: Bytes written before profiling.
        current_disk_read_bytes: Bytes read so far.
        current_disk_write_bytes: Bytes written so far.
    """

    start_time: float = 0.0
    end_time: float | None = None
    base_memory: int = 0
    step_name: str | None = None
    current_time: float | None = None
    current_memory: int = 0
    gpu_available: bool = False
    gpu_current_memory: int = 0
    gpu_peak_memory: int = 0
    disk_io_available: bool = False
    baseline_disk_read_bytes: int = 0
    baseline_disk_write_bytes: int = 0
    current_disk_read_bytes: int = 0
    current_disk_write_bytes: int = 0


class BaseMetric(ABC):
    """A number or a text that the profiler writes to its file."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The key of the metric in the file."""

    @abstractmethod
    def get_definition(self) -> str:
        """Return the definition of the metric in one sentence."""

    @abstractmethod
    def collect(self, context: MetricContext) -> Any:
        """Return the value of the metric, or None if it cannot be measured."""


class SummaryMetric(BaseMetric):
    """A metric of the whole program."""


class CheckpointMetric(BaseMetric):
    """A metric at the beginning or the end of a step."""


def _metric(base: Any, key: str, definition: str, value: Callable[[MetricContext], Any]) -> type[BaseMetric]:
    """Return the class of a metric."""

    class Metric(base):
        name = key

        def get_definition(self) -> str:
            return definition

        def collect(self, context: MetricContext) -> Any:
            return value(context)

    Metric.__doc__ = definition
    return Metric


def _on_disk(size: Callable[[MetricContext], int]) -> Callable[[MetricContext], float | None]:
    return lambda c: _mib(size(c)) if c.disk_io_available else None


def _mib(size: float) -> float:
    return round(size / _MIB, 3)


def _peak_memory(_: MetricContext) -> float:
    return _mib(peak_bytes())


def _read(c: MetricContext) -> int:
    return c.current_disk_read_bytes - c.baseline_disk_read_bytes


def _written(c: MetricContext) -> int:
    return c.current_disk_write_bytes - c.baseline_disk_write_bytes


_S, _C = SummaryMetric, CheckpointMetric
TotalTimeMetric = _metric(
    _S, "total_quantization_time_seconds", "Seconds from the beginning to the end.", lambda c: round((c.end_time or 0) - c.start_time, 3)
)
CPUPeakMemoryMetric = _metric(_S, "peak_memory_mb", "Most memory of the process, in MiB.", _peak_memory)
GPUPeakMemoryMetric = _metric(
    _S, "peak_gpu_memory_mb", "Most memory on the GPU, in MiB.", lambda c: _mib(c.gpu_peak_memory) if c.gpu_available else None
)
TotalDiskReadMbMetric = _metric(_S, "total_disk_read_mb", "MiB that the process has read from disks.", _on_disk(_read))
TotalDiskWriteMbMetric = _metric(_S, "total_disk_write_mb", "MiB that the process has written to disks.", _on_disk(_written))
PeakCacheDirDiskUsageMbMetric = _metric(
    _S, "peak_cache_dir_disk_usage_mb", "Size of cache directories; always absent, since none are used.", lambda _: None
)
StepNameMetric = _metric(_C, "step", "Step that begins or ends.", lambda c: c.step_name or "")
TimestampMetric = _metric(_C, "timestamp", "Seconds since the epoch.", lambda c: c.current_time)
RelativeTimeMetric = _metric(
    _C, "relative_time_secs", "Seconds since the beginning.", lambda c: round((c.current_time or 0) - c.start_time, 3)
)
CPUMemoryMbMetric = _metric(_C, "cpu_memory_mb", "Memory of the process, in MiB.", lambda c: _mib(c.current_memory))
GPUMemoryMbMetric = _metric(
    _C, "gpu_memory_mb", "Memory on the GPU, in MiB.", lambda c: _mib(c.gpu_current_memory) if c.gpu_available else None
)
DiskReadMbMetric = _metric(_C, "disk_read_mb", "MiB read since the beginning.", _on_disk(_read))
DiskWriteMbMetric = _metric(_C, "disk_write_mb", "MiB written since the beginning.", _on_disk(_written))


class GlobalProfiler:
    """Measures steps if ``QUARK_PROFILING=1`` is set. A process has only one instance.

    Args:
        output_path: A YAML file. The profiler writes an entry at the beginning and at the end of each step,
            and a summary when the program ends. Only the first call in a process sets the path.

    Attributes:
        summary_metrics: Metrics of the summary. You may add more.
        checkpoint_metrics: Metrics of each entry. You may add more.
    """

    _instance: ClassVar[GlobalProfiler | None] = None

    def __new__(cls, output_path: str | Path = "quark_profile.yaml") -> GlobalProfiler:
        """Return the profiler of this process. The first call creates it."""
        if cls._instance is None:
            cls._instance = super().__new__(cls)
            cls._instance._begin(Path(output_path))
        return cls._instance

    def _begin(self, output_path: Path) -> None:
        self.enabled = os.environ.get("QUARK_PROFILING") == "1"
        self.output_path = output_path
        summary = (TotalTimeMetric, CPUPeakMemoryMetric, GPUPeakMemoryMetric, TotalDiskReadMbMetric, TotalDiskWriteMbMetric)
        self.summary_metrics: list[Any] = [metric() for metric in summary]
        own = (StepNameMetric, TimestampMetric, RelativeTimeMetric, CPUMemoryMbMetric, GPUMemoryMbMetric, DiskReadMbMetric)
        self.checkpoint_metrics: list[Any] = [metric() for metric in (*own, DiskWriteMbMetric)]
        self._base = _context(MetricContext(start_time=time.time()))
        if self.enabled:
            output_path.parent.mkdir(parents=True, exist_ok=True)
            output_path.write_text("memory_usage:\n", encoding="utf-8", newline="\n")
            self.checkpoint(ProfileStep.START)
            atexit.register(self.stop)

    @contextmanager
    def scope(self, step_name: str, user_msg: str | None = None) -> Iterator[GlobalProfiler]:
        """Measure the body of the ``with`` statement as one step.

        Args:
            step_name: Name of the step, from `ProfileStep`.
            user_msg: Another name for the step.
        """
        self.checkpoint(f"{user_msg or step_name} Start")
        try:
            yield self
        finally:
            self.checkpoint(f"{user_msg or step_name} End")

    def stop(self) -> None:
        """Write the summary and stop measuring. This method is called when the program ends."""
        if not self.enabled:
            return
        self.checkpoint(ProfileStep.END)
        self.enabled = False
        context = attrs.evolve(_context(self._base), end_time=time.time())
        lines = [f"{name}: {value}" for name, value in _collected(self.summary_metrics, context)]
        lines += [f"# {metric.name}: {metric.get_definition()}" for metric in (*self.checkpoint_metrics, *self.summary_metrics)]
        self._append("\n".join(lines))

    def checkpoint(self, step: str) -> None:
        """Write an entry for the beginning or the end of a step, such as ``"Model Loading Start"``."""
        if self.enabled:
            context = attrs.evolve(_context(self._base), step_name=step)
            self._append("- " + "\n  ".join(f"{name}: {value}" for name, value in _collected(self.checkpoint_metrics, context)))

    def _append(self, text: str) -> None:
        with self.output_path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(f"{text}\n")


def profile_scope(step: str, user_msg: str | None = None) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator that measures each call of a function as a step.

    The arguments are those of `GlobalProfiler.scope`.
    """

    def decorator(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def measured(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with GlobalProfiler().scope(step, user_msg):
                return function(*args, **kwargs)

        return measured

    return decorator


def _collected(metrics: Sequence[BaseMetric], context: MetricContext) -> Iterator[tuple[str, str]]:
    for metric in metrics:
        if (value := metric.collect(context)) is not None:
            yield metric.name, json.dumps(value)


def _context(base: MetricContext) -> MetricContext:
    """Return a `MetricContext` with the current measurements.

    If ``base`` has no measurement of memory yet, the current measurements also become the baseline.
    """
    memory, process = resident_bytes(), psutil.Process()
    counts = hasattr(process, "io_counters")  # not on macOS
    read, written = process.io_counters()[2:4] if counts else (0, 0)
    disk: dict[str, Any] = {"current_disk_read_bytes": read, "current_disk_write_bytes": written}
    if not base.base_memory:
        disk |= {name.replace("current", "baseline"): value for name, value in disk.items()}
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    gpu: dict[str, Any] = {}
    if cuda is not None and cuda.is_available():
        gpu = {"gpu_available": True, "gpu_current_memory": cuda.memory_allocated(), "gpu_peak_memory": cuda.max_memory_allocated()}
    own: dict[str, Any] = {"current_time": time.time(), "current_memory": memory, "base_memory": base.base_memory or memory}
    return attrs.evolve(base, **own, **disk, **gpu, disk_io_available=counts)
