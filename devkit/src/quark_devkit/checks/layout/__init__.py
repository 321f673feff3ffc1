"""Checks of checkpoint layouts: written files, failures, and reading back (`reading`)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from torch import nn

from quark.checkpoint import CheckpointContent, ExportOptions
from quark.checkpoint.content import content_of
from quark.checkpoint.destination import COMPANIONS
from quark.checkpoint.export import export_options, export_with, exporter_of
from quark.checkpoint.shard_layout import ShardLayout
from quark.errors import ConfigError, QuarkError
from quark.models.plan.decoder_blocks import decoder_blocks
from quark.plugins import exporters
from quark.runs.run import plan_run
from quark.runs.skeleton import quantized_skeleton
from quark_devkit.check import NotApplicableError, assume, check, raises, require
from quark_devkit.checks.layout.exports import (
    REFUSALS,
    SHARD,
    export_from_disk,
    exported,
    first_export,
    first_stored,
    is_slow,
    sharded_export,
    source_export,
    stored_model,
    temporary,
    watched_export,
    written,
)
from quark_devkit.checks.layout.stored_files import CAN_LIMIT, failing_open, largest_file, stored_tensors, wrong_index
from quark_devkit.small_models import fitting_schemes, quantized, run_config, small_model
from quark_devkit.subject import Subject
from quark_devkit.whole_runs import contents, first_difference, require_same_from_disk, require_same_when_resumed

PARTS = ("reading", "keeping", "safety")
SIZES = (0, 100, 10_000)
"""File sizes at which writing fails: at once, in a header, in the middle."""


@check("layout")
def stores_or_refuses_every_scheme(subject: Subject) -> None:
    """The layout stores at least one registered scheme, and refuses all others with a reason before it writes
    a file.

    Its method ``check`` refuses the same schemes, so that a plan shows the refusal. If an export takes
    seconds, the check stores only three of the schemes that ``check`` accepts.
    """
    stored, models = 0, {scheme: quantized(run_config(scheme)) for scheme in fitting_schemes()}
    left_out = _left_out(subject, models)
    for scheme, model in models.items():
        if scheme in left_out:
            continue
        with temporary() as out:
            try:
                exporter_of(subject.lookup_name).export(content_of(model), out, ExportOptions())
            except REFUSALS as error:
                require(str(error).strip(), f"refuses the scheme '{scheme}' without a reason")
                files = sorted(contents(out))
                require(not files, f"writes '{files[0] if files else ''}' before it refuses the scheme '{scheme}'")
                require(_refuses_early(subject, model), f"refuses the scheme '{scheme}' when it writes, not in its method check")
                continue
            except QuarkError:
                raise
            except Exception as error:
                kind = type(error).__name__
                require(False, f"raises {kind} for the scheme '{scheme}' ({error}): raise UnsupportedError with a reason")
            stored += 1
    require(stored, f"stores none of the schemes {', '.join(models)}")


def _refuses_early(subject: Subject, model: nn.Module) -> bool:
    return raises(REFUSALS, exporter_of(subject.lookup_name).check, content_of(model), model, ExportOptions())


def _left_out(subject: Subject, models: Mapping[str, nn.Module]) -> set[str]:
    """Return the schemes that the check does not store if the layout is slow.

    These are the schemes that the layout accepts, except the middle one and the last one. The check has
    already stored the first one.
    """
    with suppress(Exception):  # the check itself says what is wrong
        if is_slow(subject):
            accepted = [scheme for scheme, model in models.items() if not _refuses_early(subject, model)]
            return {*accepted} - {accepted[len(accepted) // 2], accepted[-1]}
    return set()


@check("layout")
def writes_sound_files(subject: Subject) -> None:
    """Safetensors files match their headers and the index, and contain each tensor once, also in several
    shards."""
    for options in (None, ExportOptions(max_shard_bytes=SHARD)):
        with exported(subject, options=options) as out:
            tensors = stored_tensors(out)
            wrong = wrong_index(out, tensors)
            require(wrong is None, str(wrong))
            assume(tensors, "it writes no safetensors files")


@check("layout")
def writes_the_same_twice(subject: Subject) -> None:
    """Two exports of one model are equal, byte for byte."""
    with written(first_export(subject)) as one, written(watched_export(subject)) as two:
        different = first_difference(contents(one), contents(two))
        require(different is None, f"writes a different '{different}' the second time")


@check("layout")
def leaves_nothing_after_a_failure(subject: Subject) -> None:
    """If any file cannot be written, at any position, the export raises and leaves nothing behind."""
    first, model = first_export(subject), stored_model(subject)
    largest = max(map(len, first.files.values()))
    for number in range(len(first.opened)):
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
    outside = watched_export(subject).outside
    require(not outside, f"writes '{outside[0].name if outside else ''}' outside its directory")


@check("layout")
def leaves_the_model_as_it_is(subject: Subject) -> None:
    """An export changes no tensor, module, hook or configuration of the model."""
    changed = watched_export(subject).changed
    require(changed is None, f"changes {changed}")


@check("layout")
def declares_its_files(subject: Subject) -> None:
    """``files`` of the record covers all files of an export except ``config.json``, safetensors files and
    companions such as a tokenizer.
    """
    patterns = ("config.json", "model*.safetensors", "model.safetensors.index.json", *COMPANIONS, *subject.record.files)
    with written(sharded_export(subject)) as out:
        for file in contents(out):
            known = any(fnmatchcase(file, pattern) for pattern in patterns)
            uncovered = f"writes '{file}', which no pattern in files of its record covers"
            require(known, f"{uncovered}: add a pattern, since overwrite=True would not replace such an export")


@check("layout")
def declares_streaming(subject: Subject) -> None:
    """The record declares the capability ``streaming`` exactly if the exporter's class sets ``streams``. It
    declares ``resumable`` exactly if the class sets ``resumes``.
    """
    exporter = exporter_of(subject.lookup_name)
    for capability, attribute in (("streaming", "streams"), ("resumable", "resumes")):
        does, declares = bool(getattr(exporter, attribute)), subject.declares(capability)
        require(not declares or does, f"declares the capability '{capability}', but its class does not set {attribute} = True")
        require(declares or not does, f"sets {attribute} = True, but does not declare the capability '{capability}'")


@check("layout")
def writes_the_same_from_disk(subject: Subject) -> None:
    """A checkpoint that is quantized from disk (block by block if the layout streams) equals an export from
    memory, byte for byte. If an export is fast, this is also true for an export in shards.
    """
    if is_slow(subject):
        different = first_difference(export_from_disk(subject), source_export(subject).files)
        require(different is None, f"gives a different {different} from disk than in memory")
        return
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
    """If the exporter sets ``shares``, an export by several processes equals an export by one process, byte
    for byte."""
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
