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
    """A checkpoint layout: the classes that write it, read it, and make a float checkpoint of it.

    ``quant_methods`` and ``marks`` say which checkpoints the reader and the dequantizer get. They are
    compared with ``quantization_config`` in the checkpoint's ``config.json``. If several layouts fit, the
    layout with the most marks is used.

    Attributes:
        exporter: Reference to a class with the protocol `quark.checkpoint.Exporter`; None if the plugin does
            not write the layout.
        reader: Reference to a class that derives from `quark.checkpoint.LayoutReader`; None if the plugin
            does not load the layout.
        dequantizer: Reference to a class with the protocol `quark.checkpoint.Dequantizer`; None if a
            checkpoint of this layout cannot be quantized again.
        inspector: Reference to a class with the protocol `quark.checkpoint.inspection.Inspector`, which says
            how runtimes load a checkpoint of this layout; None if the plugin does not know. It needs a
            reader.
        quant_methods: Values of ``quant_method`` in checkpoints of this layout.
        marks: Further keys of ``quantization_config``, with the values that they have in this layout.
        files: Patterns (``fnmatch``) of the file names that the exporter writes beside ``config.json`` and
            safetensors files. Without ``quant_methods``, the exporter writes only these files, and its export
            may share a directory with another. With ``overwrite``, an earlier export is replaced only if
            nothing else is in its directory.

    Raises:
        ValueError: As `Record` does; or there is a reader or a dequantizer without quant_methods, an
            inspector without a reader, or no class that writes or reads.
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
            raise ValueError(f"the layout '{self.name}' has an inspector, which needs the result of a reader: name a reader too")
        if (self.reader is not None or self.dequantizer is not None) and not self.quant_methods:
            raise ValueError("a layout with a reader or a dequantizer says in quant_methods which checkpoints it reads")

    def fits(self, block: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint with that ``quantization_config`` has this layout."""
        return block.get("quant_method") in self.quant_methods and all(block.get(key) == value for key, value in self.marks.items())


@attrs.frozen(kw_only=True)
class DatasetRecord(Record):
    """A source of text for calibration and evaluation: a named data set, or files of one kind.

    Attributes:
        samples: Reference to a function that yields the samples, always in the same order. A sample is a
            text; or a chat, which is a list of messages with the keys ``role`` and ``content``; or a
            dictionary with an ``image`` or ``audio`` and its ``text``. Keyword arguments are the source's
            options. A source that reads files also has the argument ``path``, the path of a file.
        suffixes: Endings of the files that it reads, such as ``".jsonl"``; empty for a named data set.
        example: Reference to a function that writes a small file of the kind to a path, for the conformance
            suite; for a source that reads files.
        is_online: Whether the data are downloaded; the conformance suite then does not read them.

    Raises:
        ValueError: As `Record` does; or an ending does not begin with a dot.
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
    """A metric: one number for each predicted token; evaluations report mean and standard error.

    Attributes:
        metric: Reference to a function ``(log_q, targets, log_p)`` that returns a value for each token,
            ``[N]``. It gets the model's log-probabilities ``[N, vocabulary]``, the right tokens ``[N]``, and
            the reference's log-probabilities or None.
        needs_reference: Whether it compares with a reference model; otherwise ``log_p`` is None.
    """

    metric: Reference = attrs.field(converter=as_reference, metadata=function_reference())
    needs_reference: bool = False


@attrs.frozen(kw_only=True)
class SelectorRecord(Record):
    """A selector: it chooses a scheme for each group of layers, under a budget.

    Attributes:
        selector: Reference to a class with the protocol `quark_workbench.mixed_precision.SchemeSelector`. It
            can be called without arguments; keyword arguments with defaults are the selector's options.
    """

    selector: Reference = attrs.field(converter=as_reference, metadata=function_reference("select", options=options_of))


@attrs.frozen(kw_only=True)
class CommandRecord(Record):
    """A command of the program, called as ``quark NAME``. ``quark --help`` shows its ``summary``.

    Attributes:
        command: Reference to a function or to a ``typer.Typer``, loaded when the command is called. typer
            reads the arguments and options of the command from the function's annotated arguments. Commands
            of a ``typer.Typer`` are called as ``quark NAME COMMAND``.
        group: Heading in ``quark --help``; its own heading keeps the commands of a plugin together.
    """

    command: Reference = attrs.field(converter=as_reference, metadata=function_reference())
    group: str = attrs.field(default="Commands", validator=attrs.validators.instance_of(str))
