"""Records of exporters, datasets, metrics, selectors and commands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs

from quark.base.lazy import Reference, as_optional_reference, as_reference
from quark.plugins.options import dataset_options, options_of
from quark.plugins.record_fields import as_marks, as_strings, function_reference
from quark.plugins.records import Record


@attrs.frozen(kw_only=True)
class ExporterRecord(Record):
    """A checkpoint layout. The record names the classes that write, load and dequantize such checkpoints.

    quark compares ``quant_methods`` and ``marks`` with the ``quantization_config`` in a checkpoint's
    ``config.json``, to find the layout of the checkpoint. If several layouts fit, the layout with the most
    marks is used.

    Attributes:
        exporter: Reference to a class with the protocol `quark.checkpoint.Exporter`. None if the plugin does
            not write the layout.
        reader: Reference to a class that derives from `quark.checkpoint.LayoutReader`. None if the plugin
            does not load the layout.
        dequantizer: Reference to a class with the protocol `quark.checkpoint.Dequantizer`. None if a
            checkpoint of this layout cannot be quantized again.
        inspector: Reference to a class with the protocol `quark.checkpoint.inspection.Inspector`, which says
            how runtimes load a checkpoint of this layout. None if the plugin has no such class. A record with
            an inspector needs a reader too.
        quant_methods: Values of ``quant_method`` in checkpoints of this layout.
        marks: Mapping from further keys of ``quantization_config`` to the values that they have in this
            layout.
        files: Patterns (``fnmatch``) of the names of the files that the exporter writes, except
            ``config.json`` and safetensors files. If ``quant_methods`` is empty, the exporter writes only
            files that match, and another export may be in the same directory. With ``overwrite``, quark
            replaces an earlier export only if the directory contains no other files.

    Raises:
        ValueError: A field is malformed (see `Record`). Or the record has a reader or a dequantizer without
            ``quant_methods``, or an inspector without a reader. Or it has neither exporter nor reader nor
            dequantizer.
    """

    exporter: Reference | None = attrs.field(
        default=None, converter=as_optional_reference, metadata=function_reference("export", options=options_of)
    )
    reader: Reference | None = attrs.field(
        default=None, converter=as_optional_reference, metadata=function_reference("configuration", "prepare", "place_of")
    )
    dequantizer: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=function_reference("float_tensors"))
    inspector: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=function_reference("support"))
    quant_methods: tuple[str, ...] = attrs.field(default=(), converter=as_strings)
    marks: Mapping[str, str] = attrs.field(factory=dict, converter=as_marks, hash=False)
    files: tuple[str, ...] = attrs.field(default=(), converter=as_strings)

    def __attrs_post_init__(self) -> None:
        if self.exporter is None and self.reader is None and self.dequantizer is None:
            raise ValueError(f"the layout '{self.name}' has neither exporter nor reader nor dequantizer: name one of them")
        if self.inspector is not None and self.reader is None:
            raise ValueError(f"the layout '{self.name}' has an inspector, but not the reader that the inspector needs. Name a reader too")
        if (self.reader is not None or self.dequantizer is not None) and not self.quant_methods:
            raise ValueError("a layout with a reader or a dequantizer needs quant_methods: list the 'quant_method' of its checkpoints")

    def fits(self, block: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint with the ``quantization_config`` ``block`` has this layout."""
        return block.get("quant_method") in self.quant_methods and all(block.get(key) == value for key, value in self.marks.items())


@attrs.frozen(kw_only=True)
class DatasetRecord(Record):
    """A source of text for calibration and evaluation. It is a named data set, or it reads files of one kind.

    Attributes:
        samples: Reference to a function that yields the samples, always in the same order. A sample is a
            text, a chat, or a dictionary. A chat is a list of messages with the keys ``role`` and
            ``content``. A dictionary has the key ``text`` and one of the keys ``image`` and ``audio``. The
            keyword arguments of the function are the options of the source. If the source reads files, the
            function also has the argument ``path``, the path of a file.
        suffixes: Endings of the names of the files that the source reads, such as ``".jsonl"``. A named data
            set has no suffixes.
        example: Reference to a function that writes a small file of this kind to a path. The conformance
            suite uses the file. Only a source that reads files needs this function.
        is_online: Whether the source downloads its data. The conformance suite does not read such a source.

    Raises:
        ValueError: A field is malformed (see `Record`), or an ending does not begin with a dot.
    """

    samples: Reference = attrs.field(converter=as_reference, metadata=function_reference(options=dataset_options))
    suffixes: tuple[str, ...] = attrs.field(default=(), converter=as_strings)
    example: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=function_reference())
    is_online: bool = False

    def __attrs_post_init__(self) -> None:
        for suffix in self.suffixes:
            if not re.fullmatch(r"\.[a-z0-9]+", suffix):
                raise ValueError(f"{suffix!r} is not the ending of a file name: write a dot and lower-case letters, such as '.jsonl'")


@attrs.frozen(kw_only=True)
class MetricRecord(Record):
    """A metric, which computes one number for each predicted token. Evaluations report the mean of these
    numbers and the standard error of the mean.

    Attributes:
        metric: Reference to a function ``(log_q, targets, log_p)`` that returns a value for each token, as a
            tensor of shape ``[N]``. ``log_q`` contains the log-probabilities of the model and has the shape
            ``[N, vocabulary]``. ``targets`` contains the correct token ids and has the shape ``[N]``.
            ``log_p`` contains the log-probabilities of the reference model, or is None.
        needs_reference: Whether the metric compares the model with a reference model. If False, ``log_p``
            is None.
    """

    metric: Reference = attrs.field(converter=as_reference, metadata=function_reference())
    needs_reference: bool = False


@attrs.frozen(kw_only=True)
class SelectorRecord(Record):
    """A selector, which chooses a scheme for each group of layers such that a budget is not exceeded.

    Attributes:
        selector: Reference to a class with the protocol `quark_workbench.mixed_precision.SchemeSelector`. The
            class can be created without arguments. Its keyword arguments are the options of the selector.
    """

    selector: Reference = attrs.field(converter=as_reference, metadata=function_reference("select", options=options_of))


@attrs.frozen(kw_only=True)
class CommandRecord(Record):
    """A command of the program, called as ``quark NAME``. ``quark --help`` shows its ``summary``.

    Attributes:
        command: Reference to a function or to a ``typer.Typer``. quark imports it when a user calls the
            command. typer derives the arguments and options of the command from the annotated parameters of
            the function. If it is a ``typer.Typer``, users call its subcommands as ``quark NAME COMMAND``.
        group: Heading in ``quark --help`` under which the command is listed. A plugin with several commands
            can choose a heading for them.
    """

    command: Reference = attrs.field(converter=as_reference, metadata=function_reference())
    group: str = attrs.field(default="Commands", validator=attrs.validators.instance_of(str))
