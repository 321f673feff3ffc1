"""A planned run as text: the plan, and what the run writes and needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from quark.models.plan.plan_text import plan_lines
from quark.runs.estimate import Estimate
from quark.runs.planned_run import PlannedRun

__all__ = ["estimate_lines", "planned_lines"]


def planned_lines(planned: PlannedRun) -> list[str]:
    """Return a planned run as lines of text, without what refuses it."""
    lines = [] if planned.plan is None else plan_lines(planned.plan)
    if planned.needs_data:
        lines.append(f"  data: calibration text is needed by {planned.needs_data} (--calib)")
    if planned.estimate is not None:
        lines += estimate_lines(planned.estimate)
    return lines + [f"  warning: {warning}" for warning in planned.warnings]


def estimate_lines(estimate: Estimate) -> list[str]:
    """Return an estimate as lines of text."""
    return ["Estimate:", *_output(estimate), *_memory(estimate), *_work(estimate), *_time(estimate)]


def _output(estimate: Estimate) -> Iterator[str]:
    output = estimate.output
    if output is None:
        yield "  output: not known; the exporter does not announce its tensors"
        return
    bits = f", {output.bits_per_quantized_weight:.3f} bits per quantized weight with its scales" if output.quantized_weights else ""
    yield f"  output: {output.bytes:,} bytes in {len(output.files)} file(s){bits}, {output.bits_per_weight:.3f} per weight of the model"


def _memory(estimate: Estimate) -> Iterator[str]:
    of_device = f", {_size(estimate.device_bytes)} of it on {estimate.device}" if estimate.device_bytes else ""
    yield f"  memory: {_size(estimate.peak_bytes)} at the peak{of_device}: {_parts(estimate.memory, _size)}"


def _work(estimate: Estimate) -> Iterator[str]:
    work = estimate.work
    parts = {"forwards": work.forward, "statistics": work.statistics, "solver": work.solver}
    if work.flops:
        yield f"  work: {_count(work.flops)}FLOP: {_parts({name: n for name, n in parts.items() if n}, lambda n: _count(n) + 'FLOP')}"
    yield f"  rounded: {_count(work.rounded)}weights" + (f"; {work.forwards} forward(s) of each calibration token" if work.forwards else "")


def _time(estimate: Estimate) -> Iterator[str]:
    if estimate.seconds:
        total, share = sum(estimate.seconds.values()), 1.0 if estimate.block is None else estimate.block.measured_share
        how = "by a run on one block" if share == 1 else f"scaled from a run on a narrower block, of {share:.1%} of the weights"
        yield f"  time: {_duration(total)} on this machine, {how}: {_parts(estimate.seconds, _duration)}"
    elif estimate.is_probed:
        yield "  time: not known; a block of this model does not run alone, or is too large, and its class builds no narrower one"


def _parts(parts: Mapping[str, float], form: Callable[[float], str]) -> str:
    return ", ".join(f"{name} {form(value)}" for name, value in parts.items())


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _count(count: float) -> str:
    """Return a number with the prefix of its unit, such as ``1.50 T``."""
    for scale, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if count >= scale:
            return f"{count / scale:.2f} {prefix}"
    return f"{count:.0f} "


def _duration(seconds: float) -> str:
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.2g} s"
