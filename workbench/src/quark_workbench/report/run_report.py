"""`ReportOptions`, which writes the report of a run from disk into its checkpoint at the end of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
from torch import nn

from quark.base.log import get_logger
from quark.calibration.report import CalibrationReport
from quark.checkpoint.reader import import_model_from_safetensors
from quark.errors import ConfigError
from quark.models.plan.mixtures import separate_experts
from quark.runs.memory import tokens_in
from quark.runs.run import Run
from quark.runs.source import CheckpointSource
from quark.runs.started_run import FinishedRun
from quark_workbench.report.contents import Facts
from quark_workbench.report.files import write_report
from quark_workbench.report.hidden_states import hidden_errors

__all__ = ["LEVELS", "ReportOptions"]

LEVELS = ("standard", "full")
"""How much a report measures: ``full`` also hashes the weights and, on a few calibration samples, compares
hidden states after the run.
"""


@attrs.frozen
class ReportOptions:
    """The options of a report. An object writes the report when it is called with a finished run.

    Attributes:
        level: How much the report measures; one of `LEVELS`.
        command: The command line of the run, which the report shows.
        started: The value of `time.perf_counter` at the start of the run.
        selection: The selection that chose the schemes of the run, as
            `quark_workbench.mixed_precision.SelectionResult.to_dict` returns it. The report plots the
            selection. None means that there was no selection.
    """

    level: str = attrs.field(default="standard")
    command: str = ""
    started: float = attrs.field(factory=time.perf_counter)
    selection: Mapping[str, Any] | None = None

    @level.validator
    def _check(self, _: Any, level: str) -> None:
        if level not in LEVELS:
            raise ConfigError(f"there is no report '{level}': choose one of {', '.join(LEVELS)}, or none")

    def __call__(self, finished: FinishedRun, directory: Path, device: str, reopened: Callable[[], CheckpointSource]) -> None:
        """Write the report of a run into its checkpoint.

        If this fails, the error is logged, and the checkpoint has no report.

        Args:
            finished: The finished run.
            directory: Directory of the complete checkpoint. It may be renamed after this call.
            device: Torch device of the run.
            reopened: Function that opens the float checkpoint again, for a full report.
        """
        run, report, is_full = finished.run, finished.report, self.level == "full"
        facts = Facts(
            samples=len(run.data),
            tokens=tokens_in(run.data),
            two_passes=run.two_passes,
            seconds=time.perf_counter() - self.started,
            device=device,
            hashes_weights=is_full,
            command=self.command,
            selection=self.selection,
        )
        try:
            if is_full and run.data and not any("hidden" in row for row in report.blocks.values()):
                _add_hidden(report, run, reopened, directory)
            write_report(finished.content, report, directory, facts)
        except Exception as error:  # a complete checkpoint outlives any error of its report
            get_logger(__name__).warning(f"No report was written ({type(error).__name__}: {error}); the checkpoint is complete without it.")


def _add_hidden(report: CalibrationReport, run: Run, opened: Callable[[], CheckpointSource], directory: Path) -> None:
    source = opened()
    separate_experts(source.model, run.plan.config, run.plan.kept)
    source.prepare(run.plan)
    quantized: nn.Module = import_model_from_safetensors(None, directory, device=str(source.device))
    for name, row in hidden_errors(source, source.model, quantized, run.data).items():
        report.blocks.setdefault(name, {"bytes": 0, "seconds": {}})["hidden"] = row
