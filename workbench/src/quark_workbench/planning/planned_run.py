"""PlannedRun: the output and needs of a run on a checkpoint, and all known reasons why the run would fail.

No weight is read. `planned_lines` returns a `PlannedRun` as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import attrs
import torch
from torch import nn

from quark.base.version import refuse_unfit_environment
from quark.calibration.batches import refuse_text
from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.export import exporter_of, refuse_unstorable
from quark.checkpoint.exporter import ExportOptions
from quark.config.model import QConfig
from quark.errors import CheckpointError, QuarkError, UnsupportedError
from quark.models.hf.attention_switch import refuse_unswitchable
from quark.models.hf.loading import torch_device, torch_dtype
from quark.models.hf.quantized_source import float_tensors_of
from quark.models.hf.shards import INDEX, SINGLE, Shard, check_shards
from quark.models.hf.skeleton import meta_model, skeleton
from quark.models.hf.stored_tensors import StoredTensors
from quark.models.hf.tokenizer import load_tokenizer
from quark.models.plan.family import template_of, weight_converters_of
from quark.models.plan.plan_text import plan_lines
from quark.models.plan.quant_plan import CodesOf, QuantPlan
from quark.runs.from_disk import Build
from quark.runs.memory import collecting_later, free_bytes
from quark.runs.run import Run, plan_run
from quark.runs.skeleton import quantized_skeleton
from quark_workbench.planning.estimate import Estimate, estimate
from quark_workbench.planning.workload import Calibration
from quark_workbench.without_model import named_model, refuse_forwards, refuse_transforms

__all__ = ["PlannedRun", "Refusal", "estimate_lines", "plan", "planned_lines"]

_CPU = torch.device("cpu")
_P = ParamSpec("_P")
_T = TypeVar("_T")


@attrs.frozen
class Refusal:
    """A reason why a run would fail.

    Attributes:
        kind: Name of the class of the error that the run would raise.
        message: The message of this error.
    """

    kind: str
    message: str


@attrs.frozen
class PlannedRun:
    """The plan, the estimate and the refusals of a run on a checkpoint.

    Attributes:
        plan: The quantization of each layer; None if a refusal prevents a plan.
        estimate: What the run writes and needs; None if ``plan`` is None.
        refusals: All reasons for a failure of the run that are known without reading weights.
        needs_data: Name of the part of the run that needs calibration data. It is empty if no part needs
            data.
        warnings: Messages about probable mistakes that do not stop the run.
    """

    plan: QuantPlan | None
    estimate: Estimate | None
    refusals: tuple[Refusal, ...] = ()
    needs_data: str = ""
    warnings: tuple[str, ...] = ()

    def with_errors(self, errors: Iterable[QuarkError]) -> PlannedRun:
        """Return a copy to which the errors are added as refusals. The new refusals come first."""
        return attrs.evolve(self, refusals=tuple(dict.fromkeys((*_as_refusals(errors), *self.refusals))))

    def to_dict(self) -> dict[str, Any]:
        """Return the plan in JSON form, with the estimate, the refusals and the warnings."""
        own = {} if self.plan is None else self.plan.to_dict()
        return {
            **own,
            "warnings": [*own.get("warnings", ()), *self.warnings],
            "needs_data": self.needs_data,
            "refusals": [attrs.asdict(refusal) for refusal in self.refusals],
            "estimate": self.estimate and self.estimate.to_dict(),
        }


def plan(
    source: str | Path,
    config: QConfig | str | Callable[[nn.Module], QConfig],
    *,
    calibration: Calibration = Calibration(),  # noqa: B008 - frozen
    device: str = "cpu",
    dtype: str = "auto",
    exporter: str = "safetensors",
    options: ExportOptions | None = None,
    probing: bool = True,
    trust_remote_code: bool = False,
    without_model: bool = False,
) -> PlannedRun:
    """Return the `PlannedRun` of `quark.runs.quantize_checkpoint` on a checkpoint.

    Only ``config.json`` and the headers of the safetensors files are read. The directory may lack the
    safetensors files. The result has all independent errors that the run would raise.

    Args:
        source: Directory of a float checkpoint in Hugging Face form.
        config: The configuration. Or the name of a scheme, with which the template of the model's family
            makes the configuration. Or a function that returns the configuration for the model on the meta
            device.
        calibration: The size of the calibration data, if any are needed.
        device: As in `quark.runs.quantize_checkpoint`.
        dtype: As in `quark.runs.quantize_checkpoint`.
        exporter: As in `quark.runs.quantize_checkpoint`.
        options: As in `quark.runs.quantize_checkpoint`.
        trust_remote_code: As in `quark.runs.quantize_checkpoint`.
        probing: Whether to measure this machine for a few seconds to estimate the time.
        without_model: Whether the run is `quark_workbench.without_model.quantize_without_model`.

    Example:
        >>> from quark_tiny_model import tiny_model_dir
        >>> planned = plan(tiny_model_dir(), "int4_wo_64", probing=False)
        >>> planned.refusals, round(planned.estimate.output.bits_per_quantized_weight, 2)
        ((), 4.56)
    """
    refuse_unfit_environment()
    path, refusals = Path(source), _Refusals()
    with collecting_later():
        writer = refusals.collect(exporter_of, exporter, options or ExportOptions())
        target = refusals.collect(torch_device, device) or _CPU
        build = named_model if without_model else skeleton
        model, shards, codes_of, carried = _opened(path, dtype, refusals, build, trust_remote_code=trust_remote_code)
        run = None if model is None else refusals.collect(_run, model, config, codes_of, carried, refusals)
        if model is None or run is None:
            return PlannedRun(None, None, _as_refusals(refusals))
        if without_model:
            refusals.collect(refuse_transforms, run.plan.config)
        if run.needs_data and without_model:
            refusals.collect(refuse_forwards, run.needs_data)
        elif run.needs_data and _has_files(path):
            refusals.collect(_refuse_unreadable_data, path, run, model, calibration, trust_remote_code=trust_remote_code)
        run = run.for_data(model, calibration.calls(), target)
        numbers = None
        if writer is not None:
            with refusals.collecting():
                own = options or ExportOptions()
                content = CheckpointContent(model, run.plan.config, run.plan)
                refuse_unstorable(exporter, writer, content, quantized_skeleton(model, run.plan), own)
                file = shards[0].path if shards else None
                numbers = estimate(model, run, calibration, writer, own, target, file=file, probing=probing)
    return PlannedRun(run.plan, numbers, _as_refusals(refusals), run.needs_data, tuple(_warnings(numbers, target)))


def _has_files(path: Path) -> bool:
    """Return whether the directory has weights."""
    return (path / INDEX).exists() or (path / SINGLE).exists()


def _opened(
    path: Path, dtype: str, refusals: _Refusals, build: Build, *, trust_remote_code: bool
) -> tuple[nn.Module | None, Sequence[Shard] | None, CodesOf, Sequence[str]]:
    """Return the model on the meta device, and three facts about its checkpoint.

    These are the headers of the files, the layers that are quantized already, and the names of the tensors
    that the model class does not use. The model is None if it cannot be built. The headers are None if the
    files are damaged or missing.
    """
    codes_of: CodesOf = {}
    carried: Sequence[str] = ()
    shards = refusals.collect(check_shards, path) if _has_files(path) else None
    is_built = shards is not None or build is not skeleton
    model = _model(path, dtype, refusals, build if is_built else None, trust_remote_code=trust_remote_code)
    if model is not None and shards is not None:
        with refusals.collecting():
            stored = StoredTensors(model, shards, path, weight_converters_of(model), float_tensors_of(path, shards))
            codes_of, carried = stored.codes_of, stored.carried
    return model, shards, codes_of, carried


class _Refusals(list[QuarkError]):
    """A list that collects the errors of quark that a run would raise."""

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """If a `QuarkError` ends the body of the ``with`` statement, add the error to the list."""
        try:
            yield
        except QuarkError as error:
            self.append(error)

    def collect(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        """Call a function and return the result.

        If the call raises a `QuarkError`, add the error to the list and return None.
        """
        result = None
        with self.collecting():
            result = work(*args, **kwargs)
        return result


def _as_refusals(errors: Iterable[QuarkError]) -> tuple[Refusal, ...]:
    """Return a refusal for each line of the errors' messages. Equal refusals are returned once."""
    return tuple(dict.fromkeys(Refusal(type(error).__name__, line) for error in errors for line in str(error).split("\n")))


def _model(path: Path, dtype: str, refusals: _Refusals, build: Build | None, *, trust_remote_code: bool) -> nn.Module | None:
    """Return the model on the meta device, or None if it cannot be built.

    ``build`` makes the model. If ``build`` is None, the model is made from config.json alone.
    """
    chosen = refusals.collect(torch_dtype, dtype)
    if build is not None:
        return refusals.collect(build, path, "auto" if chosen is None else dtype, _CPU, trust_remote_code=trust_remote_code)
    return refusals.collect(meta_model, path, chosen, trust_remote_code=trust_remote_code)


def _run(
    model: nn.Module,
    config: QConfig | str | Callable[[nn.Module], QConfig],
    codes_of: CodesOf,
    carried: Sequence[str],
    refusals: _Refusals,
) -> Run:
    """Return the run with its plan. Add an error to ``refusals`` if the attention cannot be quantized."""
    if isinstance(config, str):
        config = template_of(model).get_config(scheme=config)
    run = plan_run(model, config if isinstance(config, QConfig) else config(model), codes_of, carried)
    refusals.collect(refuse_unswitchable, model, [a.name for a in run.plan.attentions])
    return run


def _refuse_unreadable_data(path: Path, run: Run, model: nn.Module, calibration: Calibration, *, trust_remote_code: bool) -> None:
    """Raise an error if the checkpoint lacks the tokenizer or processor that the calibration data need."""
    try:
        refuse_text(model, f"give --calib rows with images or sounds for {run.needs_data}, or batches in Python")
    except UnsupportedError:
        if calibration.have_media():
            return
        raise
    if load_tokenizer(path, trust_remote_code=trust_remote_code) is None:
        raise CheckpointError(
            f"'{path}' has no tokenizer for the calibration text of {run.needs_data}: copy tokenizer.json into that directory, or "
            f"give token tensors in Python"
        )


def _warnings(numbers: Estimate | None, device: torch.device) -> Iterator[str]:
    free = free_bytes(device)
    if numbers is None or free is None:
        return
    of_host = device.type == "cpu"
    needed, there = (numbers.peak_bytes, free + numbers.memory_of_program) if of_host else (numbers.device_bytes, free)
    if needed > there:
        where, others = ("here", "a machine") if of_host else (f"on {device}", "a device")
        yield (
            f"the run needs about {needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free {where}: give fewer calibration tokens "
            f"(--num-calib, --seq-len), or use {others} with more memory"
        )


def planned_lines(planned: PlannedRun) -> list[str]:
    """Return a planned run as lines of text, without its refusals."""
    lines = [] if planned.plan is None else plan_lines(planned.plan)
    if planned.needs_data:
        lines.append(f"  data: --calib is required for {planned.needs_data}")
    if planned.estimate is not None:
        lines += estimate_lines(planned.estimate)
    return lines + [f"  warning: {warning}" for warning in planned.warnings]


def estimate_lines(estimate: Estimate) -> list[str]:
    """Return an estimate as lines of text."""
    return ["Estimate:", *_output(estimate), *_memory(estimate), *_work(estimate), *_time(estimate)]


def _output(estimate: Estimate) -> Iterator[str]:
    output = estimate.output
    if output is None:
        yield "  output: not known; the exporter does not list its tensors in advance"
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
        yield "  time: not known; a block of this model does not run alone, or it is too large and its class builds no narrower one"


def _parts(parts: Mapping[str, float], form: Callable[[float], str]) -> str:
    return ", ".join(f"{name} {form(value)}" for name, value in parts.items())


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _count(count: float) -> str:
    """Return a number as text with an SI prefix, such as ``1.50 T``."""
    for scale, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if count >= scale:
            return f"{count / scale:.2f} {prefix}"
    return f"{count:.0f} "


def _duration(seconds: float) -> str:
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.2g} s"
