"""Output: describes where and how a run from disk writes its result. It has a directory, an exporter and
ranks.
"""

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
    """The output of a run: the directory, the exporter and the options of the export.

    Attributes:
        path: The output directory.
        exporter: Name of the exporter.
        writer: The exporter.
        options: Options of the export.
        leftover: What happens if an earlier run has left finished blocks. The run continues after these
            blocks, discards them, or is refused.
        ranks: The processes that write to the output. The first one creates the directory and renames it at
            the end.
        source: The float checkpoint. Some of its files may be copied to the output.
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
        """Check that a run is allowed to write to ``path``, and return the output.

        The arguments and errors are those of `quark.runs.quantize_checkpoint`.
        """
        if resume and restart:
            raise ConfigError("resume uses the finished blocks of an earlier run, and restart discards them. Set only one of the two")
        leftover: Leftover = "resume" if resume else "restart" if restart else "refuse"
        if ranks.is_first:  # on other ranks, the check would fail, because the first rank has locked the directory
            refuse_used_directory(path, exporter, overwrite=options.overwrite, resume=resume, source=source)
            refuse_unfinished_run(path, leftover)
        return cls(path, exporter, exporter_of(exporter, options), options, leftover, ranks, source)

    def is_finished(self, identity: RunIdentity) -> bool:
        """Return whether the user wants to resume a run, but the run is already finished.

        The errors are those of `is_finished_run`.
        """
        if self.leftover != "resume":
            return False
        is_finished = self.ranks.is_first and is_finished_run(self.path, identity, overwrite=self.options.overwrite)
        if is_finished:
            get_logger().info(f"'{self.path}' is complete: an earlier run with the same settings has written it.")
        return self.ranks.broadcast(is_finished)

    def built(self) -> AbstractContextManager[Path]:
        """Return a context manager that yields the directory that becomes the output.

        Only the first rank uses the context manager.
        """
        return exporting(self.exporter, self.path, overwrite=self.options.overwrite, leftover=self.leftover, source=self.source)

    @contextmanager
    def opened(self) -> Iterator[Path]:
        """Yield the directory to write to, on every rank. This directory becomes the output."""
        if not self.ranks.is_first:
            directory = Path(self.ranks.broadcast(""))
            if not directory.is_dir():
                raise OutputError(
                    f"process {self.ranks.rank} cannot find '{directory}', in which process 0 builds the output. Run all processes with "
                    "the same file system, mounted at the same path"
                )
            yield directory
            return
        with self.built() as directory:
            self.ranks.broadcast(str(directory.absolute()))
            yield directory

    def refuse_unstorable(self, model: nn.Module, plan: QuantPlan) -> None:
        """Raise UnsupportedError if the exporter's layout cannot store the quantized model.

        The tensors of ``model`` must be on the meta device.
        """
        content = CheckpointContent(model, plan.config, plan)
        refuse_unstorable(self.exporter, self.writer, content, quantized_skeleton(model, plan), self.options)

    def has_journal(self, run: Run) -> bool:
        """Return whether a run keeps a journal of its finished blocks, so that it can be resumed."""
        return run.algorithms.works_by_block and self.writer.resumes and not self.is_divided(run)

    def is_divided(self, run: Run) -> bool:
        """Return whether each block is quantized by only one of several ranks.

        Return True only if no calibration is needed, because a calibration forward pass would have to run
        through all blocks.
        """
        return self.ranks.size > 1 and not run.needs_data

    def is_shared(self, run: Run) -> bool:
        """Return whether each rank writes its own blocks."""
        return self.writer.shares and self.is_divided(run)

    def refuse_to_resume(self, run: Run) -> None:
        """Raise UnsupportedError if the user wants to resume a run that has no journal."""
        if self.leftover != "resume" or self.has_journal(run):
            return
        reason = f"the exporter '{self.exporter}' cannot continue an interrupted export (it does not declare resumes = True)"
        if not run.algorithms.works_by_block:
            reason = "one of its algorithms changes the whole model, so nothing is written before the whole model is quantized"
        elif self.is_divided(run):
            reason = f"its {self.ranks.size} processes divide the blocks among them, because it needs no data, and write no journal"
        raise UnsupportedError(f"this run cannot be resumed: {reason}. Leave out resume=True (--resume) to start from the beginning")
