"""Exports of the small model in a layout. Checks that only read files share one export."""

from __future__ import annotations

import json
import platform
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import torch
from torch import nn

from quark.checkpoint import ExportOptions
from quark.checkpoint.content import content_of
from quark.checkpoint.export import export_with, exporter_of
from quark.errors import ConfigError, UnsupportedError
from quark.models.hf.loading import load_model
from quark.runs import ModelQuantizer, quantize_checkpoint
from quark_devkit.check import NotApplicableError, require
from quark_devkit.checks.layout.stored_files import failing_open
from quark_devkit.extent import SLOW, is_thorough
from quark_devkit.small_models import batches, fitting_schemes, quantized, run_config, saved
from quark_devkit.subject import Subject
from quark_devkit.transformed_models import named_parts
from quark_devkit.whole_runs import contents

__all__ = [
    "ANY_TOKENIZER",
    "REFUSALS",
    "SHARD",
    "FirstExport",
    "SourceExport",
    "WatchedExport",
    "export_from_disk",
    "exported",
    "first_export",
    "first_stored",
    "is_slow",
    "new_export",
    "sharded_export",
    "source_export",
    "stored_exports",
    "stored_model",
    "temporary",
    "watched_export",
    "written",
]

REFUSALS = (UnsupportedError, ConfigError)
SHARD = 20_000
"""Bytes of a shard, small enough for several shards of the small model."""
_MACHINE = "machine-of-the-conformance-suite"
"""The name of this machine during an export: its own name, such as "model", may be a word of any file."""
_TOKENIZER = "tokenizer.json"
_ALL = 1_000_000
"""More files than any export opens, so that none of them fails."""


class _Tokenizer:
    """The part of a tokenizer that exporters use."""

    file = "added_tokens.json"

    def save_pretrained(self, save_directory: str | Path, /) -> None:
        (Path(save_directory) / self.file).write_text("{}", encoding="utf-8", newline="\n")


ANY_TOKENIZER = _Tokenizer()
"""A tokenizer for exporters that write it beside the weights."""


@attrs.frozen(eq=False)
class FirstExport:
    """An export of the small model in the first scheme that a layout stores.

    Attributes:
        scheme: Name of the scheme.
        files: All files by relative path, including the files that record the run.
        opened: The files that were opened for writing, in order.
        seconds: CPU seconds of the export.
    """

    scheme: str
    files: Mapping[str, bytes]
    opened: tuple[Path, ...]
    seconds: float


@attrs.frozen(eq=False)
class WatchedExport:
    """A second export of the same model, whose effects were watched.

    Attributes:
        files: All files by relative path.
        outside: Files that the export wrote outside the given directory.
        changed: The part of the model that the export changed, such as ``"the model's configuration"``; None
            if it changed nothing.
        seconds: CPU seconds of the export.
    """

    files: Mapping[str, bytes]
    outside: tuple[Path, ...]
    changed: str | None
    seconds: float


@attrs.frozen(eq=False)
class SourceExport:
    """An export of a model that was loaded from a float checkpoint.

    Attributes:
        files: All files by relative path, without the file of the run's identity.
        config: The ``config.json`` of the float checkpoint.
        tokenizer: The ``tokenizer.json`` of the float checkpoint; None if the layout writes tokenizers into
            its own file.
        places: Paths and names of this machine, and today's date. No file should contain one of these.
    """

    files: Mapping[str, bytes]
    config: Mapping[str, Any]
    tokenizer: bytes | None
    places: frozenset[str]


@contextmanager
def temporary() -> Iterator[Path]:
    """Yield a directory that exists while the body runs."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextmanager
def exported(subject: Subject, model: Any = None, options: ExportOptions | None = None) -> Iterator[Path]:
    """Yield the directory of an export, which exists while the body runs.

    Args:
        subject: The layout.
        model: A quantized model; None for `stored_model`. With neither a model nor options, the directory has
            the files of `first_export`.
        options: Options of the export.
    """
    if model is None and options is None:
        with written(first_export(subject)) as out:
            yield out
        return
    with temporary() as parent:
        export_with(subject.lookup_name, stored_model(subject) if model is None else model, parent / "out", options)
        yield parent / "out"


@contextmanager
def written(export: FirstExport | WatchedExport) -> Iterator[Path]:
    """Yield a directory with the files of an export, which exists while the body runs."""
    with temporary() as parent:
        for name, content in export.files.items():
            file = parent / "out" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        yield parent / "out"


def stored_exports(subject: Subject) -> Iterator[tuple[str, nn.Module, Path]]:
    """Yield schemes that the layout stores, one for each way to store codes and scales.

    Each scheme comes with the small model in that scheme and the directory of an export. The directory exists
    until the next scheme is yielded.

    Raises:
        CheckFailedError: The layout refuses all schemes.
    """
    stored, reasons = 0, []
    for scheme in fitting_schemes():
        model = quantized(run_config(scheme))
        try:
            with exported(subject, model) as out:
                stored += 1
                yield scheme, model, out
        except REFUSALS as error:
            reasons.append(str(error))
    require(stored, f"stores none of the schemes {', '.join(fitting_schemes())}: {reasons[0] if reasons else ''}")


def stored_model(subject: Subject) -> Any:
    """Return the small model in the first scheme that the layout stores."""
    return quantized(run_config(first_stored(subject)))


def first_stored(subject: Subject) -> str:
    """Return the first scheme that the layout stores, without trying the others."""
    return first_export(subject).scheme


def first_export(subject: Subject) -> FirstExport:
    """Return an export in the first scheme that the layout stores.

    Every call returns the same export.

    Raises:
        NotApplicableError: The layout stores no scheme that fits the small model.
    """
    return _first_export(*_key(subject))


def new_export(subject: Subject) -> FirstExport:
    """Make a new export with the model and the settings of `first_export`, and return it."""
    return _new_export(subject.lookup_name)


def watched_export(subject: Subject) -> WatchedExport:
    """Return a second export, made after `first_export`, whose effects were watched.

    Every call returns the same export.
    """
    return _watched_export(*_key(subject))


def sharded_export(subject: Subject) -> FirstExport:
    """Return an export in several shards. Every call returns the same export.

    The tokenizer is `ANY_TOKENIZER`, unless the layout writes tokenizers into its own file.
    """
    return _sharded_export(*_key(subject), subject.declares("tokenizer_inside"))


def export_from_disk(subject: Subject) -> dict[str, bytes]:
    """Return the files of an export for which the float checkpoint of `source_export` was quantized from
    disk."""
    with temporary() as parent:
        source = _float_checkpoint(parent / "float", subject.declares("tokenizer_inside"))
        quantize_checkpoint(source, parent / "out", run_config(first_stored(subject)), batches(), exporter=subject.lookup_name)
        return contents(parent / "out")


def source_export(subject: Subject) -> SourceExport:
    """Return an export of a model that was loaded from a float checkpoint.

    Every call returns the same export.
    """
    return _source_export(*_key(subject), subject.declares("tokenizer_inside"))


def is_slow(subject: Subject) -> bool:
    """Return whether an export takes seconds. Checks then make fewer exports, except before a release."""
    if is_thorough() or first_export(subject).seconds <= SLOW:
        return False
    return watched_export(subject).seconds > SLOW  # the first export imports what all of them need


def _key(subject: Subject) -> tuple[object, object, str]:
    return subject.catalog, subject.registry.revision, subject.lookup_name


@lru_cache(maxsize=8)
def _first_export(_of: object, _revision: object, layout: str) -> FirstExport:
    return _new_export(layout)


def _new_export(layout: str) -> FirstExport:
    for scheme in fitting_schemes():
        with suppress(*REFUSALS):
            return _export(layout, scheme, None)
    raise NotApplicableError("it stores none of the schemes that fit the small model")


def _export(layout: str, scheme: str, options: ExportOptions | None) -> FirstExport:
    with temporary() as parent:
        model, begin = quantized(run_config(scheme)), time.process_time()
        with failing_open(parent, _ALL) as opened:
            export_with(layout, model, parent / "out", options)
        return FirstExport(scheme, _files(parent / "out"), tuple(opened), time.process_time() - begin)


@lru_cache(maxsize=8)
def _watched_export(of: object, revision: object, layout: str) -> WatchedExport:
    model = quantized(run_config(_first_export(of, revision, layout).scheme))
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parts, configs = named_parts(model), _configs(model)
    with temporary() as parent:
        out = parent / "out"
        out.mkdir()
        begin = time.process_time()
        with failing_open(parent, _ALL) as opened:
            exporter_of(layout).export(content_of(model), out, ExportOptions())
        seconds = time.process_time() - begin
        outside = [path for path in opened if not path.resolve().is_relative_to(out.resolve())]
        outside += [path for path in parent.iterdir() if path != out]
        changed = _changed(model, tensors, parts, configs)
        return WatchedExport(_files(out), tuple(outside), changed, seconds)


@lru_cache(maxsize=8)
def _sharded_export(of: object, revision: object, layout: str, is_tokenizer_inside: bool) -> FirstExport:
    scheme = _first_export(of, revision, layout).scheme
    options = ExportOptions(max_shard_bytes=SHARD, tokenizer=None if is_tokenizer_inside else ANY_TOKENIZER)
    return _export(layout, scheme, options)


def _float_checkpoint(directory: Path, is_tokenizer_inside: bool) -> Path:
    """Write the small model as a float checkpoint, and return its directory.

    The checkpoint gets a placeholder for the tokenizer file. A layout that writes tokenizers into its own
    file gets none, since the placeholder is no valid tokenizer.
    """
    saved(directory)
    if not is_tokenizer_inside:
        (directory / _TOKENIZER).write_text('{"kept": "as it is"}', encoding="utf-8", newline="\n")
    return directory


@lru_cache(maxsize=8)
def _source_export(of: object, revision: object, layout: str, is_tokenizer_inside: bool) -> SourceExport:
    scheme = _first_export(of, revision, layout).scheme
    with temporary() as parent:
        source, out = _float_checkpoint(parent / "float", is_tokenizer_inside), parent / "out"
        model = ModelQuantizer(run_config(scheme)).quantize_model(load_model(source), batches())
        named = mock.Mock(return_value=_MACHINE)
        with mock.patch.object(socket, "gethostname", named), mock.patch.object(platform, "node", named):
            export_with(layout, model, out)
        paths = (parent, Path.cwd(), Path.home(), Path(tempfile.gettempdir()))
        places = {str(place) for path in paths for place in (path, path.resolve())}
        places |= {_MACHINE, str(date.today()), str(datetime.now(UTC).date())}
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        tokenizer = None if is_tokenizer_inside else (source / _TOKENIZER).read_bytes()
        return SourceExport(contents(out), config, tokenizer, frozenset(places))


def _configs(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return model.config.to_dict(), model.quant_config.to_dict()


def _changed(model: nn.Module, tensors: Mapping[str, torch.Tensor], parts: object, configs: tuple[Any, Any]) -> str | None:
    """Return the part of the model that is not as before; None if nothing has changed."""
    after = model.state_dict()
    changed = [name for name, tensor in tensors.items() if name not in after or not torch.equal(tensor, after[name])]
    if changed:
        return f"the model's '{changed[0]}'"
    if named_parts(model) != parts:
        return "the model's modules, parameters, buffers or hooks"
    names = ("the model's configuration", "the quantization configuration of the model")
    return next((name for name, one, other in zip(names, configs, _configs(model), strict=True) if one != other), None)


def _files(directory: Path) -> dict[str, bytes]:
    """Return all files, including the files that record the run (`quark_devkit.whole_runs.contents` leaves
    these out)."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}
