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
from quark.checkpoint.atomic_directory import Leftover, refuse_unfinished_run
from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.destination import refuse_used_directory
from quark.checkpoint.export import exporter_of, exporting, refuse_unstorable
from quark.checkpoint.exporter import Exporter, ExportOptions
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
        leftover: Whether finished blocks of an earlier run are resumed or discarded, or refuse the run.
        ranks: The processes that write to it. The first makes its directory and gives it its name.
        source: The float checkpoint, copies of whose files may lie there.
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

        Arguments and errors as of `quark.runs.quantize_checkpoint`.
        """
        if resume and restart:
            raise ConfigError("resume goes on from the finished blocks of an earlier run, and restart discards them: set one of the two")
        leftover: Leftover = "resume" if resume else "restart" if restart else "refuse"
        if ranks.is_first:  # the locks that are tried would look to the other ranks like those of another run
            refuse_used_directory(path, exporter, overwrite=options.overwrite, resume=resume, source=source)
            refuse_unfinished_run(path, leftover)
        return cls(path, exporter, exporter_of(exporter, options), options, leftover, ranks, source)

    def is_finished(self, identity: RunIdentity) -> bool:
        """Return whether a run that is to be resumed, the one of that identity, has nothing left to do.

        Raises as `is_finished_run`.
        """
        if self.leftover != "resume":
            return False
        is_finished = self.ranks.is_first and is_finished_run(self.path, identity, overwrite=self.options.overwrite)
        if is_finished:
            get_logger().info(f"'{self.path}' is finished: this very run has written it, and there is nothing left to do.")
        return self.ranks.broadcast(is_finished)

    def built(self) -> AbstractContextManager[Path]:
        """Return the context of the directory that the first rank writes to, which becomes the output."""
        return exporting(self.exporter, self.path, overwrite=self.options.overwrite, leftover=self.leftover, source=self.source)

    @contextmanager
    def opened(self) -> Iterator[Path]:
        """Yield the directory to write to, which becomes the output, on every rank."""
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
        """Raise UnsupportedError if the layout cannot hold the model, which is on the meta device."""
        content = CheckpointContent(model, plan.config, plan)
        refuse_unstorable(self.exporter, self.writer, content, quantized_skeleton(model, plan), self.options)

    def has_journal(self, run: Run) -> bool:
        """Return whether a run enters its finished blocks in a journal, from which it can be resumed."""
        return run.algorithms.works_by_block and self.writer.resumes and not self.is_divided(run)

    def is_divided(self, run: Run) -> bool:
        """Return whether each block is one rank's.

        That is so where there are several, and no calibration forward has to pass all blocks.
        """
        return self.ranks.size > 1 and not run.needs_data

    def is_shared(self, run: Run) -> bool:
        """Return whether each rank writes its own blocks."""
        return self.writer.shares and self.is_divided(run)

    def refuse_to_resume(self, run: Run) -> None:
        """Raise UnsupportedError if a run that keeps no journal is to resume."""
        if self.leftover != "resume" or self.has_journal(run):
            return
        reason = f"the exporter '{self.exporter}' cannot go on with an export of another process (it does not say resumes = True)"
        if not run.algorithms.works_by_block:
            reason = "an algorithm of it changes the whole model, so that nothing is written before all of it is quantized"
        elif self.is_divided(run):
            reason = f"nothing in it needs calibration data, and {self.ranks.size} processes divide its blocks without a journal of them"
        raise UnsupportedError(f"this run cannot be resumed: {reason}. Leave out resume=True (--resume); it starts from the beginning")
