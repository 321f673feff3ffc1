"""Functions that check an output directory, and that move a complete export into this directory.

An output directory may contain companions of the weights, files of other exporters, and an earlier export.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from quark.base.files import exchange, link_or_copy, move_directory
from quark.checkpoint.companions import copied_companions
from quark.checkpoint.layout_reader import quantization_block
from quark.errors import OutputError, QuarkError
from quark.models.hf.custom_code import code_of
from quark.models.hf.tokenizer import TOKENIZER_FILES
from quark.plugins import ExporterRecord, exporters

COMPANIONS = (
    *TOKENIZER_FILES,
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "generation_config.json",
)
"""Files that a user may have saved beside the weights of a checkpoint before the export, such as a tokenizer.
"""

REPORT_FILES = ("quark_report.json", "quark_report.html")
"""Names of the files with the report of a run."""

RUN_FILE = "quark_run.json"
"""Name of the file that identifies the run that wrote a checkpoint (`quark.checkpoint.run_file`)."""

OF_THE_RUN = (*REPORT_FILES, RUN_FILE)
"""Names of files about a run. They belong to the export, but readers of checkpoints ignore them."""

REPLACED = "replaced"
"""Name of the directory to which an earlier export is moved. It is beside the directory of the new export."""

_EXPORTED = re.compile(r"config\.json|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


def refuse_used_directory(
    out: Path, exporter: str | None = None, *, overwrite: bool = False, resume: bool = False, source: Path | None = None
) -> None:
    """Raise an error if ``out`` is not free.

    ``out`` is free if it does not exist, is empty, or contains only files that may stay (`_lies_beside`).

    Args:
        out: The output directory.
        exporter: Name of the exporter that will write to ``out``. None means an unknown exporter. Then only
            `COMPANIONS` may stay.
        overwrite: Whether ``out`` may contain an earlier export. An earlier export has a ``config.json`` with
            a ``quantization_config`` of an installed layout, and contains only files that exports write.
            These files include the Python files that the export's configs name, and the modules that these
            files import.
        resume: Whether ``out`` may be the output of a run that reads the model from disk.
            `quark.runs.identity.is_finished_run` checks whether ``out`` is the output of the same run.
        source: The float checkpoint. ``out`` may contain exact copies of this checkpoint's companions
            (`quark.checkpoint.companions.copied_companions`).

    Raises:
        OutputError: ``out`` contains other files, or is a file, a mount point or the current directory.
        UnknownNameError: There is no exporter with the name ``exporter``.
    """
    try:
        names = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    except OSError as error:
        raise OutputError(
            f"the output '{out}' cannot be accessed ({error.strerror}). Choose a place that you may read and write"
        ) from error
    if out.exists() and not out.is_dir():
        raise OutputError(f"the output '{out}' is a file. Choose a directory that does not exist yet")
    what = "a mount point" if out.resolve().is_mount() else "the current directory" if out.is_dir() and out.samefile(Path.cwd()) else None
    if what is not None:
        raise OutputError(f"the output '{out}' is {what}, which cannot be replaced. Choose a directory in it, such as '{out / 'model'}'")
    copies = copied_companions(out, source)
    others = [name for name in names if not (name in copies or _lies_beside(out / name, exporter))]
    if not others or (resume and RUN_FILE in others):
        return
    if not overwrite:
        fix = "pass overwrite=True to replace the earlier export" if _is_export(out) else "remove this directory first"
        raise OutputError(f"the output directory '{out}' is not empty (it holds '{others[0]}'). Choose another directory, or {fix}")
    if (why := _why_not_replaceable(out, others)) is not None:
        raise OutputError(f"the output directory '{out}' cannot be replaced, because {why}. Choose another directory, or remove it first")


def refuse_full_disk(directory: Path, size: int) -> None:
    """Raise OSError with ``ENOSPC`` if fewer than ``size`` bytes are free on the disk of a directory."""
    if size > shutil.disk_usage(directory).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))


def move_into_place(export: Path, out: Path, exporter: str | None = None, *, overwrite: bool = False, source: Path | None = None) -> None:
    """Rename a complete export to ``out``.

    Files that `refuse_used_directory` allows stay in ``out``, except the files of an earlier export. Existing
    companions stay unchanged. But if there is an earlier export, the companions of the new export replace the
    existing ones. Afterwards, the path ``export``, or the path `REPLACED` beside it, contains the earlier
    export. You may remove the earlier export.

    Raises:
        OutputError: Other files were put into ``out`` in the meantime. Or the exporter has written a file
            that belongs to another exporter, and the record of the first exporter does not name this file.
    """
    refuse_used_directory(out, exporter, overwrite=overwrite, source=source)
    if not out.is_dir() or not any(out.iterdir()):
        move_directory(export, out)
        return
    replaces = overwrite and _is_export(out)
    shared, copies = (*COMPANIONS, *_code_of(out)), copied_companions(out, source)
    for path in out.iterdir():
        is_new = (export / path.name).exists()
        if path.name in copies:
            if not is_new:
                _keep(path, export)
            continue
        if not _lies_beside(path, exporter) or (is_new and replaces and path.name in COMPANIONS):
            continue
        if is_new and path.name not in shared:
            raise OutputError(f"'{out}' holds '{path.name}' of another exporter, and '{exporter}' writes it too. Choose another directory")
        _keep(path, export)
    if exchange(export, out):
        return
    # Between these two renames, there is no export at ``out``. If the process is killed there, the next run
    # moves the earlier export back.
    earlier = export.with_name(REPLACED)
    out.rename(earlier)
    try:
        export.rename(out)
    except BaseException:
        earlier.rename(out)
        raise


def _lies_beside(path: Path, exporter: str | None) -> bool:
    """Return whether a file in the output directory may stay beside a new export of ``exporter``.

    A file whose name is in `COMPANIONS` may stay. A file that only another exporter writes may stay too,
    unless both exporters write checkpoints.
    """
    if path.name in COMPANIONS:
        return True
    if exporter is None or not path.is_file() or _writes(own := exporters().get(exporter), path.name):
        return False
    if path.name in _code_of(path.parent):
        return not writes_checkpoint(own)
    return any(_writes(other, path.name) and not (writes_checkpoint(own) and writes_checkpoint(other)) for other in exporters())


def _writes(record: ExporterRecord, name: str) -> bool:
    """Return whether an exporter writes files with the name ``name``."""
    in_checkpoint = writes_checkpoint(record) and (name in OF_THE_RUN or _EXPORTED.fullmatch(name) is not None)
    return in_checkpoint or any(fnmatchcase(name, pattern) for pattern in record.files)


def writes_checkpoint(record: ExporterRecord) -> bool:
    """Return whether an exporter writes a checkpoint with a ``config.json``.

    Other exporters write only the files that their records name.
    """
    return bool(record.quant_methods) or not record.files


def _keep(path: Path, export: Path) -> None:
    """Put a file or folder of the output directory into ``export``, which will replace the output directory.

    A file is linked if possible, and copied otherwise.
    """
    target = export / path.name
    if path.is_dir():
        shutil.copytree(path, target)
        return
    target.unlink(missing_ok=True)
    link_or_copy(path, target)


def _why_not_replaceable(out: Path, names: Sequence[str]) -> str | None:
    """Return why an export must not replace ``out``, which contains ``names``. Return None if it may."""
    patterns = [pattern for record in exporters() for pattern in record.files]
    written = [name for name in names if name not in (*OF_THE_RUN, *_code_of(out)) and not _EXPORTED.fullmatch(name)]
    if unknown := [name for name in written if not any(fnmatchcase(name, p) for p in patterns)]:
        return f"it holds '{unknown[0]}', which no export writes"
    if not _is_export(out):
        return "it is no export of quark (its config.json has no quantization_config of a layout that is installed)"
    return "it is a link to another directory" if out.is_symlink() else None


def _code_of(export: Path) -> list[str]:
    """Return the names of the Python files that an export contains as copies from the float checkpoint.

    The result is empty if the configs of the export are unreadable.
    """
    try:
        return code_of(export)
    except QuarkError:
        return []


def _is_export(directory: Path) -> bool:
    """Return whether a directory contains a checkpoint whose layout an installed exporter can write."""
    try:
        return any(exporters().get(name).exporter is not None for name in exporters().fitting(quantization_block(directory)))
    except QuarkError:
        return False
