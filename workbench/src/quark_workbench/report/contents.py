"""The contents of a report as JSON values.

`contents_of` combines the measurements of a run with the sizes of its checkpoint. `schema.json` describes
every field.
"""

from __future__ import annotations

import math
import platform
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any

import attrs
import torch

from quark.base.machine import cores, processor, total_bytes
from quark.base.names import without_numbers
from quark.base.scalars import decibels
from quark.base.version import VERSION, transformers_version
from quark.calibration.phases import PHASES
from quark.calibration.report import CalibrationReport
from quark.checkpoint.content import CheckpointContent
from quark.config.describe import describe_layer
from quark.models.hf.internals import source_of
from quark.models.plan.decoder_blocks import decoder_blocks
from quark.models.plan.plan_row import PlanRow
from quark_workbench.report.flags import THRESHOLDS, flags_of
from quark_workbench.report.layer_figures import keep_worst
from quark_workbench.report.sizes import block_of, files_of, kind_of, sizes_of

__all__ = ["FORMAT", "FORMAT_VERSION", "Facts", "contents_of", "machine", "probe", "with_flags"]

FORMAT = "quark-report"
FORMAT_VERSION = 1
"""Version of the format. It increases if a field changes its meaning or is removed, not for new fields."""

_OF_WEIGHT = ("snr_db", "peak_to_rms", "scale_ratio", "input_peak_to_rms")
_OF_ROUNDING = (
    *("tokens", "damping", "shrinkage", "attempts", "dead", "output_mse", "few_tokens", "correction_share", "held_out_error"),
    *("output_snr_db", "nearest_snr_db", "to_nearest_because"),
)


@attrs.frozen
class Facts:
    """Facts about a run that its calibration report lacks, and what its report should measure.

    Attributes:
        samples: Number of calibration samples.
        tokens: Number of calibration tokens.
        two_passes: Whether each block ran twice to save memory.
        seconds: Seconds of the whole run; None if they are unknown.
        device: Torch device of the run.
        hashes_weights: Whether the report should have hashes of large files too.
        is_probed: Whether the report should have the measured speed of the machine.
        command: The command line of the run, which the report shows.
        selection: The selection that chose the schemes of the run, as
            `quark_workbench.mixed_precision.SelectionResult.to_dict` returns it; None without a selection.
    """

    samples: int = 0
    tokens: int = 0
    two_passes: bool = False
    seconds: float | None = None
    device: str = "cpu"
    hashes_weights: bool = False
    is_probed: bool = True
    command: str = ""
    selection: Mapping[str, Any] | None = None


def contents_of(content: CheckpointContent, report: CalibrationReport, directory: Path, facts: Facts) -> dict[str, Any]:
    """Return the contents of a report.

    Args:
        content: The quantized model with its configuration and its plan. The tensors of the model may be on
            the meta device.
        report: The calibration report of the run. It is empty if the run is unknown.
        directory: Directory of the checkpoint.
        facts: Facts about the run.
    """
    model, plan = content.model, content.plan
    blocks = [b.name for b in decoder_blocks(model, plan.architecture) if b.name]
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    element = dtype.itemsize
    rows = _with_ties(model, plan.rows)
    float_bytes = _float_bytes(model, rows, element)
    sizes = sizes_of(rows, blocks, float_bytes, element, directory)
    bits = sizes.pop("layers")
    config: Any = getattr(model, "config", None)
    name = Path(source_of(config)).name if config is not None else ""
    contents = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": {
            "name": name or type(model).__name__,
            "class": type(model).__name__,
            "model_type": getattr(config, "model_type", None),
            "parameters": float_bytes // element,
            "blocks": blocks,
        },
        "settings": _settings(content, facts),
        "versions": _versions(),
        "machine": machine(facts.device) | {"probe": probe(facts.device, dtype) if facts.is_probed else None},
        "sizes": sizes,
        "layers": [_layer(row, report, blocks, bits.get(row.name)) for row in plan.rows if row.config is not None],
        "transforms": list(_transforms(report)),
        "tunings": list(_tunings(report)),
        "model_error": {**report.model_error, "does_harm": report.does_harm} if report.model_error else None,
        "depth": _depth(report),
        "evaluation": None,
        "histograms": _histograms(report),
        "experts": {"tokens": report.tokens},
        "selection": None if facts.selection is None else dict(facts.selection),
        "files": files_of(directory, hashes_weights=facts.hashes_weights),
    }
    contents["time"] = _time(report, contents, facts)
    return with_flags(_finite(contents))


def _finite(value: Any) -> Any:
    """Return a copy of JSON values in which None replaces NaN and infinity."""
    if isinstance(value, dict):
        return {str(key): _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def with_flags(contents: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a report's contents to which flags and the thresholds of flags are added."""
    return contents | {"flags": flags_of(contents), "thresholds": dict(THRESHOLDS)}


def _with_ties(model: torch.nn.Module, rows: tuple[PlanRow, ...]) -> tuple[PlanRow, ...]:
    """Return rows that name, for each tied weight, the first layer with the same weight.

    This is necessary because a plan that is read from a checkpoint has no tied weights.
    """
    owners: dict[int, str] = {}
    tied = []
    for row in rows:
        weight = model.get_submodule(row.name)._parameters.get("weight")
        owner = row.name if weight is None else owners.setdefault(id(weight), row.name)
        tied.append(attrs.evolve(row, tied_to=owner) if owner != row.name else row)
    return tuple(tied)


def _float_bytes(model: torch.nn.Module, rows: tuple[PlanRow, ...], element: int) -> int:
    """Return the bytes of the float model. Tied weights count once."""
    layers = {row.name for row in rows}
    others = {id(p): p for n, p in model.named_parameters() if n.rpartition(".")[0] not in layers or n.endswith(".bias")}
    return sum(prod(row.shape) * element for row in rows if row.tied_to is None) + sum(p.numel() * element for p in others.values())


def _settings(content: CheckpointContent, facts: Facts) -> dict[str, Any]:
    plan = content.plan
    return {
        "scheme": content.config.scheme,
        "algorithms": [a.to_dict() for a in content.config.algo_config or ()],
        "layers": _layer_settings(plan.rows),
        "calibration": {"samples": facts.samples, "tokens": facts.tokens, "two_passes": facts.two_passes},
        "command": facts.command,
        "notes": list(plan.notes),
        "warnings": list(plan.warnings),
    }


def _layer_settings(rows: tuple[PlanRow, ...]) -> list[dict[str, Any]]:
    """Return entries with the quantization of layers. Layers with the same quantization share an entry if
    their names differ only in numbers.
    """
    counts: Counter[tuple[str, str, str]] = Counter()
    for row in rows:
        what = describe_layer(row.config) + (f", by {row.algorithm}" if row.algorithm else "")
        counts[without_numbers(row.name), what, row.reason] += 1
    return [{"layers": name, "count": count, "quantized_to": what, "reason": reason} for (name, what, reason), count in counts.items()]


def _versions() -> dict[str, str]:
    own = {"quark-core", "quark-schemes", "quark-algos", "quark-templates", "quark-exporters"}
    plugins = {entry.dist.name: entry.dist.version for entry in metadata.entry_points(group="quark") if entry.dist is not None}
    versions = {"quark": VERSION, "torch": torch.__version__, "transformers": str(transformers_version())}
    others = {name: version for name, version in sorted(plugins.items()) if name not in own}
    return {**versions, "python": platform.python_version(), **others}


def _layer(row: PlanRow, report: CalibrationReport, blocks: list[str], bits: float | None) -> dict[str, Any]:
    assert row.config is not None
    metrics, figures = report.layers.get(row.name, {}), report.weights.get(row.name, {})
    return {
        "name": row.name,
        "block": block_of(row.name, blocks),
        "kind": kind_of(row.name, blocks),
        "quantized_to": describe_layer(row.config),
        "algorithm": row.algorithm,
        "weights": prod(row.shape),
        "columns": row.shape[-1] if row.shape else 0,
        "bits": bits if row.config.weight is not None else None,
        "input_quantized": row.config.input_tensors is not None,
        "unreached": row.name in report.unreached,
        **{key: figures.get(key) for key in _OF_WEIGHT},
        **{key: metrics.get(key) for key in _OF_ROUNDING},
    }


def _transforms(report: CalibrationReport) -> Iterator[dict[str, Any]]:
    """Yield a dictionary for each comparison of outputs before and after transforms.

    A comparison is for the whole model and one transform, or for a block.
    """
    for of_whole, metrics_of in ((True, report.validated), (False, report.transformed)):
        for name, metrics in metrics_of.items():
            if "error_before" not in metrics and "applied" not in metrics:
                continue  # this entry has only the scales of one mapping
            yield {"name": name, "whole_model": of_whole, **metrics, **_ratios(metrics)}


def _tunings(report: CalibrationReport) -> Iterator[dict[str, Any]]:
    """Yield a dictionary for each block and tuning: output errors before and after, and further figures."""
    for name, of_block in report.tuned.items():
        for tuning, metrics in of_block.items():
            if "error_before" in metrics:
                yield {"name": name, "algorithm": tuning, **metrics, **_ratios(metrics)}


def _ratios(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Return signal-to-noise ratios in dB, computed from the output errors before and after a change."""
    return {f"snr_{when}_db": decibels(1.0, metrics.get(f"error_{when}") or 0.0) for when in ("before", "after")}


def _depth(report: CalibrationReport) -> dict[str, Any]:
    blocks = [{"block": name, **row["hidden"]} for name, row in report.blocks.items() if "hidden" in row]
    return {"measured": "in the run" if blocks else None, "blocks": blocks}


def _histograms(report: CalibrationReport) -> list[dict[str, Any]]:
    """Return the histograms of the worst layers, the worst first."""
    worst = dict(report.histograms)
    keep_worst(worst, report.weights)  # a resumed run, or several processes, bring more
    ratio = {name: report.weights.get(name, {}).get("snr_db") for name in worst}
    order = sorted(worst, key=lambda name: (ratio[name] is None, ratio[name] or 0.0))
    return [{"layer": name, "input": None, **worst[name]} for name in order]


def _time(report: CalibrationReport, contents: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
    """Return the seconds of the run, of each phase and of each block.

    For a phase, the result also has the share of the time that its bytes and FLOPs need at the measured speed
    of the machine.
    """
    rows, limits = report.blocks.values(), contents["machine"]["probe"]
    bytes_of = {"load": sum(row["bytes"] for row in rows), "write": contents["sizes"]["stored_bytes"] or 0}
    flops_of = {key: sum(row.get("flops", {}).get(key, 0) for row in rows) for key in ("forward", "statistics")}
    phases = []
    for name in PHASES:
        if (seconds := report.seconds.get(name)) is None:
            continue
        moved, flops = bytes_of.get(name, 0), flops_of.get(name, 0)
        least = None if limits is None else 2 * moved / limits["copy_bytes_per_second"] + flops / limits["flops"]
        # A mapped file is read when its bytes are first used, perhaps in a later phase. A share above 1 shows
        # this, and is left out.
        share = least / seconds if least and 0 < least <= seconds else None
        phases.append({"phase": name, "seconds": seconds, "bytes": moved or None, "flops": flops or None, "share_of_limit": share})
    blocks = [{"block": name, "seconds": row["seconds"]} for name, row in report.blocks.items()]
    return {"seconds": facts.seconds, "phases": phases, "blocks": blocks}


_COPIED = 32 << 20
"""Bytes of the copied tensor, larger than caches."""
_SIDE = 1024
"""Rows and columns of the multiplied matrices."""
_ATTEMPTS = 3


@cache
def probe(device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Measure how fast the machine copies memory and multiplies matrices.

    The fastest of a few attempts counts. The measurement is made once per process.

    Args:
        device: Torch device.
        dtype: Dtype of the matrices, which should be the dtype of the model.

    Returns:
        ``copy_bytes_per_second``: the bytes per second that a copy within memory reads and writes.
        ``flops``: the floating-point operations per second of a matrix product.
    """
    source = torch.ones(_COPIED // 4, device=device)
    target = torch.empty_like(source)
    copying = min(_seconds(lambda: target.copy_(source), device) for _ in range(_ATTEMPTS))
    matrix = torch.ones(_SIDE, _SIDE, dtype=dtype, device=device)
    multiplying = min(_seconds(lambda: matrix @ matrix, device) for _ in range(_ATTEMPTS))
    return {"copy_bytes_per_second": 2 * _COPIED / copying, "flops": 2 * _SIDE**3 / multiplying}


def machine(device: str = "cpu") -> dict[str, Any]:
    """Return facts about the machine: processor, cores, threads, memory and device.

    The result has no name of a host or user. The text for the processor names the widest vector instructions
    that torch uses, since signal-to-noise ratios depend on them.
    """
    is_cuda = device.startswith("cuda") and torch.cuda.is_available()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": f"{processor()} ({torch.backends.cpu.get_cpu_capability()})",
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": total_bytes(),
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
    }


def _seconds(work: Any, device: str) -> float:
    started = time.perf_counter()
    work()
    if torch.device(device).type != "cpu":
        torch.get_device_module(device).synchronize()
    return max(time.perf_counter() - started, 1e-9)
