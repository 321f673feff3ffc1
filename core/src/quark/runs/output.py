"""Output: the directory that a run from disk writes to, with its exporter and the ranks that share it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Self

import attrs
from torch import nn

from quark.base.log import get_logger
from quark.base.ranks import ALONE, Ranks
from quark.checkpoint import CheckpointContent, Exporter, ExportOptions
from quark.checkpoint.atomic_directory import Leftover, refuse_unfinished_run
from quark.checkpoint.destination import refuse_used_directory
from quark.checkpoint.export import exporter_of, exporting, refuse_unstorable
from quark.errors import ConfigError, OutputError, UnsupportedError
from quark.models.plan.quant_plan import QuantPlan
from quark.runs.identity import RunIdentity, is_finished_run
from quark.runs.run import Run
from quark.runs.skeleton import quantized_skeleton


@attrs.frozen(eq=False)
class Output:
    """The output of a run: its directory, exporter and options.

    Attributes:
        path: The output directory.
        exporter: Name of the exporter.
        writer: The exporter.
        options: Options of the export.
        leftover: Whether finished blocks of an earlier run are resumed or discarded, or stop the run.
        ranks: The processes that write to it. The first creates its directory and renames it at the end.
        source: The float checkpoint. The output may have copies of its files.
    """

    path: Path
    exporter: str
    writer: Exporter
    options: ExportOptions
    leftover: Leftover = "refuse"
    ranks: Ranks = ALONE
    source: Path | None = None

    @classmethod
    def of(
        cls,
        path: Path,
        exporter: str,
        options: ExportOptions,
        source: Path | None = None,
        *,
        resume: bool = False,
        restart: bool = False,
        ranks: Ranks = ALONE,
    ) -> Self:
        """Return the output, after checks that a run may write to it.

        Arguments and errors are as in `quark.runs.quantize_checkpoint`.
        """
        if resume and restart:
            raise ConfigError("resume keeps the finished blocks of an earlier run, and restart discards them: set one of the two")
        leftover: Leftover = "resume" if resume else "restart" if restart else "refuse"
        if ranks.is_first:  # other ranks would take the locks of this check for another run's
            refuse_used_directory(path, exporter, overwrite=options.overwrite, resume=resume, source=source)
            refuse_unfinished_run(path, leftover)
        return cls(path, exporter, exporter_of(exporter, options), options, leftover, ranks, source)

    def is_finished(self, identity: RunIdentity) -> bool:
        """Return whether the run of that identity is to be resumed, but is already finished.

        Raises the errors of `is_finished_run`.
        """
        if self.leftover != "resume":
            return False
        is_finished = self.ranks.is_first and is_finished_run(self.path, identity, overwrite=self.options.overwrite)
        if is_finished:
            get_logger().info(f"'{self.path}' is complete: an earlier run with the same settings has written it.")
        return self.ranks.broadcast(is_finished)

    def built(self) -> AbstractContextManager[Path]:
        """Return a context with the directory that the first rank writes to. It becomes the output."""
        return exporting(self.exporter, self.path, overwrite=self.options.overwrite, leftover=self.leftover, source=self.source)

    @contextmanager
    def opened(self) -> Iterator[Path]:
        """Yield, on every rank, the directory to write to. It becomes the output."""
        if not self.ranks.is_first:
            directory = Path(self.ranks.broadcast(""))
            if not directory.is_dir():
                raise OutputError(
                    f"rank {self.ranks.rank} cannot see '{directory}', in which rank 0 builds the output: all processes need the same "
                    "file system, under the same path"
                )
            yield directory
            return
        with self.built() as directory:
            self.ranks.broadcast(str(directory.absolute()))
            yield directory

    def refuse_unstorable(self, model: nn.Module, plan: QuantPlan) -> None:
        """Raise UnsupportedError if the layout cannot hold the model. The model is on the meta device."""
        content = CheckpointContent(model, plan.config, plan)
        refuse_unstorable(self.exporter, self.writer, content, quantized_skeleton(model, plan), self.options)

    def has_journal(self, run: Run) -> bool:
        """Return whether a run keeps a journal of its finished blocks, so that it can be resumed."""
        return run.algorithms.works_by_block and self.writer.resumes and not self.is_divided(run)

    def is_divided(self, run: Run) -> bool:
        """Return whether each block is quantized by one rank.

        True if there are several ranks, and no calibration forward pass has to pass all blocks.
        """
        return self.ranks.size > 1 and not run.needs_data

    def is_shared(self, run: Run) -> bool:
        """Return whether each rank writes its own blocks."""
        return self.writer.shares and self.is_divided(run)

    def refuse_to_resume(self, run: Run) -> None:
        """Raise UnsupportedError if a run is to be resumed but keeps no journal."""
        if self.leftover != "resume" or self.has_journal(run):
            return
        reason = f"the exporter '{self.exporter}' cannot continue an interrupted export (it does not say resumes = True)"
        if not run.algorithms.works_by_block:
            reason = "one of its algorithms changes the whole model, so nothing is written before all of it is quantized"
        elif self.is_divided(run):
            reason = f"it needs no calibration data, and its {self.ranks.size} processes divide the blocks without a journal"
        raise UnsupportedError(f"this run cannot be resumed: {reason}. Leave out resume=True (--resume) to start from the beginning")
