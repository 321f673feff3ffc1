"""Checks of checkpoint layouts: written files, failures, and reading back (`reading`)."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quark.checkpoint import CheckpointContent, ExportOptions
from quark.checkpoint.content import content_of
from quark.checkpoint.destination import COMPANIONS
from quark.checkpoint.export import export_options, export_with, exporter_of
from quark.checkpoint.shard_layout import ShardLayout
from quark.errors import ConfigError, QuarkError, UnsupportedError
from quark.models.plan.decoder_blocks import decoder_blocks
from quark.plugins import Catalog, exporters
from quark.runs.run import plan_run
from quark.runs.skeleton import quantized_skeleton
from quark_devkit.check import NotApplicableError, assume, check, raises, require
from quark_devkit.checks.layout.stored_files import CAN_LIMIT, failing_open, largest_file, stored_tensors, wrong_index
from quark_devkit.small_models import fitting_schemes, quantized, run_config, small_model
from quark_devkit.subject import Subject
from quark_devkit.transformed_models import named_parts
from quark_devkit.whole_runs import contents, first_difference, require_same_from_disk, require_same_when_resumed

PARTS = ("reading", "keeping", "safety")
REFUSALS = (UnsupportedError, ConfigError)
SHARD = 20_000
"""Bytes of a shard, small enough for several shards of the small model."""
SIZES = (0, 100, 10_000)
"""File sizes at which writing fails: at once, in a header, in the middle."""


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
        model: A quantized model; None for `stored_model`.
        options: Options of the export.
    """
    with temporary() as parent:
        export_with(subject.lookup_name, stored_model(subject) if model is None else model, parent / "out", options)
        yield parent / "out"


def stored_exports(subject: Subject) -> Iterator[tuple[str, nn.Module, Path]]:
    """Yield schemes that the layout stores, one for each way to store codes and scales.

    Each comes with the small model in that scheme and the directory of its export, which exists until the
    next scheme.

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
    return _first_stored(subject.catalog, subject.lookup_name)


@lru_cache(maxsize=8)
def _first_stored(_of: Catalog, layout: str) -> str:
    for scheme in fitting_schemes():
        with suppress(*REFUSALS), temporary() as parent:
            export_with(layout, quantized(run_config(scheme)), parent / "out")
            return scheme
    raise NotApplicableError("it stores none of the schemes that fit the small model")


@check("layout")
def stores_or_refuses_every_scheme(subject: Subject) -> None:
    """The layout stores at least one registered scheme, and refuses all others with a reason before it writes
    a file.

    Its method ``check`` refuses the same schemes, so that a plan shows the refusal.
    """
    stored = 0
    for scheme in fitting_schemes():
        model = quantized(run_config(scheme))
        with temporary() as out:
            try:
                exporter_of(subject.lookup_name).export(content_of(model), out, ExportOptions())
            except REFUSALS as error:
                require(str(error).strip(), f"refuses the scheme '{scheme}' without a reason")
                files = sorted(contents(out))
                require(not files, f"writes '{files[0] if files else ''}' before it refuses the scheme '{scheme}'")
                refuses_early = raises(REFUSALS, exporter_of(subject.lookup_name).check, content_of(model), model, ExportOptions())
                require(refuses_early, f"refuses the scheme '{scheme}' when it writes, not in its method check")
                continue
            except QuarkError:
                raise
            except Exception as error:
                kind = type(error).__name__
                require(False, f"raises {kind} for the scheme '{scheme}' ({error}): raise UnsupportedError with a reason")
            stored += 1
    require(stored, f"stores none of the schemes {', '.join(fitting_schemes())}")


@check("layout")
def writes_sound_files(subject: Subject) -> None:
    """Safetensors files match their headers and index, and hold each tensor once, also in several shards."""
    model = stored_model(subject)
    for size in (ExportOptions().max_shard_bytes, SHARD):
        with exported(subject, model, ExportOptions(max_shard_bytes=size)) as out:
            tensors = stored_tensors(out)
            wrong = wrong_index(out, tensors)
            require(wrong is None, str(wrong))
            assume(tensors, "it writes no safetensors files")


@check("layout")
def writes_the_same_twice(subject: Subject) -> None:
    """Two exports of one model are equal, byte for byte."""
    model = stored_model(subject)
    with exported(subject, model) as one, exported(subject, model) as two:
        different = first_difference(contents(one), contents(two))
        require(different is None, f"writes a different '{different}' the second time")


@check("layout")
def leaves_nothing_after_a_failure(subject: Subject) -> None:
    """If any file cannot be written, at any position, the export raises and leaves nothing behind."""
    model = stored_model(subject)
    with temporary() as parent, failing_open(parent, 1_000_000) as seen:
        export_with(subject.lookup_name, model, parent / "out")
        largest = max(len(content) for content in contents(parent / "out").values())
        steps = len(seen)
    for number in range(steps):
        with temporary() as parent:
            with failing_open(parent, number):
                raised = raises(Exception, export_with, subject.lookup_name, model, parent / "out")
            _nothing_left(parent, raised, f"its file number {number + 1} cannot be opened")
    for size in (*(size for size in SIZES if size < largest), largest - 1) if CAN_LIMIT else ():
        with temporary() as parent:
            with largest_file(size):
                raised = raises(Exception, export_with, subject.lookup_name, model, parent / "out")
            _nothing_left(parent, raised, f"files cannot be larger than {size} bytes")


def _nothing_left(parent: Path, raised: bool, when: str) -> None:
    require(raised, f"raises no error when {when}, although the checkpoint is incomplete")
    left = sorted(path.name for path in parent.iterdir())
    require(not left, f"leaves '{left[0] if left else ''}' behind when {when}")


@check("layout")
def writes_in_its_directory_alone(subject: Subject) -> None:
    """An export writes files only into the given directory."""
    model = stored_model(subject)
    with temporary() as parent:
        (parent / "out").mkdir()
        with failing_open(parent, 1_000_000) as seen:
            exporter_of(subject.lookup_name).export(content_of(model), parent / "out", ExportOptions())
        outside = [path for path in seen if not path.resolve().is_relative_to((parent / "out").resolve())]
        outside += [path for path in parent.iterdir() if path.name != "out"]
        require(not outside, f"writes '{outside[0].name if outside else ''}' outside its directory")


@check("layout")
def leaves_the_model_as_it_is(subject: Subject) -> None:
    """An export changes no tensor, module, hook or configuration of the model."""
    model = stored_model(subject)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parts, config, own = named_parts(model), model.config.to_dict(), model.quant_config.to_dict()
    with exported(subject, model):
        after: dict[str, Tensor] = model.state_dict()
    changed = [name for name, tensor in tensors.items() if name not in after or not torch.equal(tensor, after[name])]
    require(not changed, f"changes the model's '{changed[0] if changed else ''}'")
    require(named_parts(model) == parts, "changes the model's modules, parameters, buffers or hooks")
    require(model.config.to_dict() == config, "changes the model's configuration")
    require(model.quant_config.to_dict() == own, "changes the quantization configuration of the model")


@check("layout")
def declares_its_files(subject: Subject) -> None:
    """``files`` of the record covers all files of an export except ``config.json``, safetensors files and
    companions
    such as a tokenizer.
    """
    patterns = ("config.json", "model*.safetensors", "model.safetensors.index.json", *COMPANIONS, *subject.record.files)
    with exported(subject, options=ExportOptions(max_shard_bytes=SHARD)) as out:
        for file in contents(out):
            known = any(fnmatchcase(file, pattern) for pattern in patterns)
            uncovered = f"writes '{file}', which no pattern in files of its record covers"
            require(known, f"{uncovered}: add a pattern, since overwrite=True would not replace such an export")


@check("layout")
def declares_streaming(subject: Subject) -> None:
    """The record declares the capability ``streaming`` if, and only if, the exporter's class sets
    ``streams``, and ``resumable`` if, and only if, the class sets ``resumes``.
    """
    exporter = exporter_of(subject.lookup_name)
    for capability, attribute in (("streaming", "streams"), ("resumable", "resumes")):
        does, declares = bool(getattr(exporter, attribute)), subject.declares(capability)
        require(not declares or does, f"declares the capability '{capability}', but its class does not set {attribute} = True")
        require(declares or not does, f"sets {attribute} = True, but does not declare the capability '{capability}'")


@check("layout")
def writes_the_same_from_disk(subject: Subject) -> None:
    """A checkpoint that is quantized from disk (block by block if the layout streams) equals an export from
    memory, byte for byte, also in shards.
    """
    scheme = first_stored(subject)
    for options in (None, ExportOptions(max_shard_bytes=SHARD)):
        require_same_from_disk(run_config(scheme), subject.lookup_name, options)


@check("layout")
def announces_what_it_writes(subject: Subject) -> None:
    """The exporter announces exactly the tensors that it writes. The sizes of the files follow from these
    tensors, also in shards.
    """
    exporter = exporter_of(subject.lookup_name)
    config = run_config(first_stored(subject))
    floats, model = small_model(), quantized(config)
    run = plan_run(floats, config)
    content = CheckpointContent(floats, run.plan.config, run.plan)
    for options in (ExportOptions(), ExportOptions(max_shard_bytes=SHARD)):
        parts = exporter.announced(content, quantized_skeleton(floats, run.plan), options)
        if parts is None:
            raise NotApplicableError("it does not list its tensors in advance, so a plan has no file sizes")
        announced = {name: tuple(tensor.shape) for part in parts for name, tensor in part.items()}
        with exported(subject, model, options) as out:
            written = {name: tensor.shape for name, tensor in stored_tensors(out).items()}
            sizes = {path.name: path.stat().st_size for path in out.iterdir()}
        other = first_difference(announced, written)
        require(other is None, f"does not write '{other}' as announced")
        laid_out = ShardLayout.of(parts, options.max_shard_bytes).file_sizes()
        wrong = sorted(file for file, size in laid_out.items() if sizes.get(file) != size)
        require(not wrong, f"announces tensors that do not give the size of the written file '{wrong[0] if wrong else ''}'")


@check("layout", since=2)
def is_written_by_two_processes(subject: Subject) -> None:
    """With ``shares``, an export by several processes equals an export by one process, byte for byte."""
    exporter = exporter_of(subject.lookup_name)
    assume(exporter.shares, "it does not set shares = True: one process writes all blocks")
    model, options = stored_model(subject), ExportOptions()
    content = content_of(model)
    with temporary() as parent:
        for name in ("one", "two"):
            (parent / name).mkdir()
        exporter.export(content, parent / "one", options)
        out = parent / "two"
        with exporter.stream(content, model, out, options) as first, exporter.stream(content, model, out, options) as second:
            for number, block in enumerate(decoder_blocks(model, content.plan.architecture)):
                (second if number % 2 else first).write(block)
            first.write(None)
            first.count_as_written(second.written())
            first.finish(content)
        different = first_difference(contents(parent / "one"), contents(out))
        require(different is None, f"writes a different '{different}' if two processes write the blocks")


@check("layout", needs="resumable", level="optional")
def resumes(subject: Subject) -> None:
    """A run from disk that fails and is resumed writes the same bytes as a complete run, and quantizes a
    damaged block again.
    """
    scheme = first_stored(subject)
    for options in (None, ExportOptions(max_shard_bytes=SHARD)):
        require_same_when_resumed(run_config(scheme), subject.lookup_name, options)


@check("layout")
def refuses_unknown_options(subject: Subject) -> None:
    """The layout and its exporter's class refuse unknown options. The layout accepts the default of each
    option."""
    name, unknown = subject.lookup_name, "an_option_that_no_exporter_has"
    require(raises(ConfigError, export_options, name, {unknown: 1}), f"accepts the option '{unknown}'")
    is_refused = raises((TypeError, ValueError, QuarkError), subject.load("exporter"), **{unknown: 1})
    require(is_refused, f"has a class that accepts the keyword argument '{unknown}': refuse unknown options")
    for option in exporters().options(name):
        exporter_of(name, ExportOptions(own={option.name: option.default}))
