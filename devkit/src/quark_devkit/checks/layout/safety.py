"""Checks of privacy and safety: a checkpoint names no place of this machine and contains no code, and reading
a checkpoint has no side effects."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

from quark.checkpoint import ExportOptions
from quark.checkpoint.reader import import_model_from_safetensors
from quark.plugins import exporters
from quark_devkit.check import assume, check, require
from quark_devkit.checks.layout.exports import exported, source_export, stored_model
from quark_devkit.fresh_process import in_fresh_process
from quark_devkit.option_effects import require_effects
from quark_devkit.side_effects import side_effects
from quark_devkit.small_models import small_tokenizer
from quark_devkit.subject import Subject
from quark_devkit.whole_runs import contents

_SHORTEST = 5
"""Fewest characters of a path to search for: shorter paths occur in tensors by chance."""


@check("layout", since=2)
def names_no_place_of_this_machine(subject: Subject) -> None:
    """No file of an export contains a path (of the source, the export, the working directory or the user's
    home), the name of this machine, or today's date. Two exports would differ in these."""
    export = source_export(subject)
    for file, content in export.files.items():
        found = [place for place in sorted(export.places) if len(place) >= _SHORTEST and os.fsencode(place) in content]
        require(not found, f"writes '{''.join(found[:1])}', which depends on this machine or day, to '{file}'")


@check("layout", since=2)
def writes_no_pickle(subject: Subject) -> None:
    """No file of an export is pickled, or is an archive of pickled data, since reading such data runs
    code."""
    with exported(subject) as out:
        for file, content in contents(out).items():
            require(not _is_pickle(content), f"writes pickled data to '{file}': reading it runs code from the file")


def _is_pickle(content: bytes) -> bool:
    """Return whether bytes are pickled by protocol 2 or later, or a zip archive of such data."""
    if content[:1] == b"\x80" and content[1:2] in b"\x02\x03\x04\x05" and content.rstrip()[-1:] == b".":
        return True
    if not zipfile.is_zipfile(io.BytesIO(content)):
        return False
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return any(name.endswith(".pkl") or _is_pickle(archive.read(name)) for name in archive.namelist())


@check("layout", since=2)
def reads_without_side_effects(subject: Subject) -> None:
    """Reading a checkpoint writes no file, unpickles nothing, starts no program, uses no network, and leaves
    the files as they are."""
    assume(subject.record.reader is not None, "its record names no reader")
    with exported(subject) as out:
        before = contents(out)
        effects = in_fresh_process(_effects_of_reading, out)
        require(not effects, f"{effects[0] if effects else ''} when a checkpoint is read")
        require(contents(out) == before, "changes the files of a checkpoint that is read")


def _effects_of_reading(directory: Path) -> list[str]:
    with side_effects() as effects:
        import_model_from_safetensors(None, directory, device="cpu")
    return [effect for effect in effects if not effect.startswith("changes the")]


@check("layout", since=2)
def heeds_its_options(subject: Subject) -> None:
    """Different values of the layout's own options give different files. A value may be refused instead, and
    an option may be declared to change only the cost."""
    name, model = subject.lookup_name, stored_model(subject)
    tokenizer = small_tokenizer() if subject.declares("tokenizer_inside") else None

    def results(values: dict[str, object]) -> list[object]:
        is_first = not values and tokenizer is None
        with exported(subject) if is_first else exported(subject, model, ExportOptions(own=values, tokenizer=tokenizer)) as out:
            return [contents(out)]

    require_effects(exporters().options(name), results)  # type: ignore[arg-type]
