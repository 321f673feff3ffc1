"""Checks of an output directory.

It may contain companions of the weights, files of other exporters, and an earlier export.
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
"""Files that belong to a checkpoint beside its weights, such as a tokenizer or a processor that was saved
first.
"""

REPORT_FILES = ("quark_report.json", "quark_report.html")
"""Files of the report of a run."""

RUN_FILE = "quark_run.json"
"""File that says which run wrote a checkpoint (`quark.checkpoint.run_file`)."""

OF_THE_RUN = (*REPORT_FILES, RUN_FILE)
"""Files about the run, which readers of checkpoints ignore. They belong to their export."""

REPLACED = "replaced"
"""Name of the directory to which a replaced export is moved, beside the directory of the new export.
"""

_EXPORTED = re.compile(r"config\.json|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


def refuse_used_directory(
    out: Path, exporter: str | None = None, *, overwrite: bool = False, resume: bool = False, source: Path | None = None
) -> None:
    """Raise unless ``out`` is free.

    It is free if it does not exist, is empty, or contains only files that may stay (`_lies_beside`).

    Args:
        out: The output directory.
        exporter: Name of the exporter that will write to it. None means any exporter; then only `COMPANIONS`
            may stay.
        overwrite: Whether ``out`` may contain an earlier export: a ``config.json`` with a
            ``quantization_config`` of an installed layout, and only files that exports write. These include
            the Python files that its configs name, and their imports.
        resume: Whether ``out`` may be the output of any run from disk;
            `quark.runs.identity.is_finished_run` checks that it is the output of this run.
        source: The float checkpoint: exact copies of its companions may be in ``out``
            (`quark.checkpoint.companions.copied_companions`).

    Raises:
        OutputError: ``out`` contains other files, is a file, a mount point or the current directory.
        UnknownNameError: There is no such exporter.
    """
    try:
        names = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    except OSError as error:
        raise OutputError(
            f"the output '{out}' cannot be accessed ({error.strerror}): choose a place that you may read and write"
        ) from error
    if out.exists() and not out.is_dir():
        raise OutputError(f"the output '{out}' is a file: choose a directory that does not exist yet")
    what = "a mount point" if out.resolve().is_mount() else "the current directory" if out.is_dir() and out.samefile(Path.cwd()) else None
    if what is not None:
        raise OutputError(f"the output '{out}' is {what}, which cannot be replaced: choose a directory in it, such as '{out / 'model'}'")
    copies = copied_companions(out, source)
    others = [name for name in names if not (name in copies or _lies_beside(out / name, exporter))]
    if not others or (resume and RUN_FILE in others):
        return
    if not overwrite:
        fix = "choose another, or pass overwrite=True to replace that export" if _is_export(out) else "choose another, or remove it first"
        raise OutputError(f"the output directory '{out}' is not empty (it holds '{others[0]}'): {fix}")
    if (why := _why_not_replaceable(out, others)) is not None:
        raise OutputError(f"the output directory '{out}' cannot be replaced, because {why}: choose another, or remove it first")


def refuse_full_disk(directory: Path, size: int) -> None:
    """Raise OSError with ``ENOSPC`` unless the disk of a directory has room for that many more bytes."""
    if size > shutil.disk_usage(directory).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))


def move_into_place(export: Path, out: Path, exporter: str | None = None, *, overwrite: bool = False, source: Path | None = None) -> None:
    """Rename a complete export to ``out``.

    Files that `refuse_used_directory` allows stay in ``out``, except the replaced export. Existing companions
    stay unchanged, but the new export replaces companions of the replaced export. Afterwards, the replaced
    export is at ``export``, or beside it under the name `REPLACED`. You may remove it.

    Raises:
        OutputError: Other files were put there meanwhile; or the exporter has written a file of another
            exporter, which its record does not name.
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
            raise OutputError(f"'{out}' holds '{path.name}' of another exporter, and '{exporter}' writes it too: choose another directory")
        _keep(path, export)
    if exchange(export, out):
        return
    # Two renames: for an instant there is no export. If the process is killed then, the next run moves the
    # earlier export back.
    earlier = export.with_name(REPLACED)
    out.rename(earlier)
    try:
        export.rename(out)
    except BaseException:
        earlier.rename(out)
        raise


def _lies_beside(path: Path, exporter: str | None) -> bool:
    """Return whether a file stays beside an export.

    A file of `COMPANIONS` stays, and so does a file of an exporter that writes other files. Two checkpoints
    conflict, whatever their files are called.
    """
    if path.name in COMPANIONS:
        return True
    if exporter is None or not path.is_file() or _writes(own := exporters().get(exporter), path.name):
        return False
    if path.name in _code_of(path.parent):
        return not writes_checkpoint(own)
    return any(_writes(other, path.name) and not (writes_checkpoint(own) and writes_checkpoint(other)) for other in exporters())


def _writes(record: ExporterRecord, name: str) -> bool:
    in_checkpoint = writes_checkpoint(record) and (name in OF_THE_RUN or _EXPORTED.fullmatch(name) is not None)
    return in_checkpoint or any(fnmatchcase(name, pattern) for pattern in record.files)


def writes_checkpoint(record: ExporterRecord) -> bool:
    """Return whether an exporter writes a ``config.json``, and not only the files that its record names."""
    return bool(record.quant_methods) or not record.files


def _keep(path: Path, export: Path) -> None:
    """Move a file of the output directory to the directory that replaces it, by a hard link if possible."""
    target = export / path.name
    if path.is_dir():
        shutil.copytree(path, target)
        return
    target.unlink(missing_ok=True)
    link_or_copy(path, target)


def _why_not_replaceable(out: Path, names: Sequence[str]) -> str | None:
    patterns = [pattern for record in exporters() for pattern in record.files]
    written = [name for name in names if name not in (*OF_THE_RUN, *_code_of(out)) and not _EXPORTED.fullmatch(name)]
    if unknown := [name for name in written if not any(fnmatchcase(name, p) for p in patterns)]:
        return f"it holds '{unknown[0]}', which no export writes"
    if not _is_export(out):
        return "it is no export of quark: its config.json has no quantization_config of a layout that is installed"
    return "it is a link to another directory" if out.is_symlink() else None


def _code_of(export: Path) -> list[str]:
    """Return the code in an export, copied from its float checkpoint; none if its configs are unreadable."""
    try:
        return code_of(export)
    except QuarkError:
        return []


def _is_export(directory: Path) -> bool:
    try:
        return any(exporters().get(name).exporter is not None for name in exporters().fitting(quantization_block(directory)))
    except QuarkError:
        return False
