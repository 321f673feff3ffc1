"""SafetensorsExporter: a directory in Hugging Face form."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from quark.errors import OutputError, UnsupportedError
from quark.export.protocol import BlockStream, ExportOptions, Tokenizer
from quark.export.writer import Part, ShardWriter
from quark.log import get_logger
from quark.model.blocks import Block
from quark.model.plan import QuantPlan
from quark_exporters.safetensors.layout import WHOLE, Region, float_parts, is_tied_apart, quantized_parts
from quark_exporters.safetensors.quantization_config import quantization_config

COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "generation_config.json",
)
"""Files that belong to a checkpoint beside its weights; copied from where the model was loaded, if that is a directory."""


class SafetensorsExporter:
    """Writes the Quark layout. Source: spec of the checkpoint format, §1–4 and §10."""

    def export(self, model: nn.Module, out: Path, options: ExportOptions) -> None:
        """As `quark.export.Exporter.export`; ``model`` is a transformers model."""
        with self.stream(model, model, out, options) as stream:
            stream.write(Block("", model))
            stream.finish()

    @contextmanager
    def stream(self, model: nn.Module, foreseen: nn.Module, out: Path, options: ExportOptions) -> Iterator[BlockStream]:
        """As `quark.export.StreamingExporter.stream`."""
        config = getattr(model, "config", None)
        if config is None or not hasattr(config, "to_json_file"):
            raise UnsupportedError(
                f"a {type(model).__name__} has no transformers config, without which no reader could rebuild it: only transformers models "
                "can be exported to a checkpoint in Hugging Face form"
            )
        _see_who_runs(model, options)
        announced = [part.meta for part in _parts(foreseen, options, WHOLE)]
        with ShardWriter(announced, out, options.max_shard_bytes) as writer:
            yield _Stream(model, options, out, writer)


class _Stream:
    """One export under way."""

    def __init__(self, model: nn.Module, options: ExportOptions, directory: Path, writer: ShardWriter) -> None:
        self._model = model
        self._options = options
        self._directory = directory
        self._writer = writer
        self._written: list[str] = []

    def write(self, block: Block | None) -> None:
        """As `quark.export.BlockStream.write`."""
        if block is None and "" in self._written:
            return  # the model is one block, and nothing lies outside
        region = Region(without=tuple(self._written)) if block is None else Region(block.name)
        if block is not None:
            self._written.append(block.name)
        for part in _parts(self._model, self._options, region):
            # A tied parameter was announced once, under the first of its names.
            if all(name in self._writer for name in part.meta):
                self._writer.write(part)

    def finish(self) -> None:
        """As `quark.export.BlockStream.finish`."""
        self._writer.finish()
        real = self._options.weight_format == "real_quantized"
        _config_of(self._model, self._options if real else None).to_json_file(self._directory / "config.json")
        if self._options.tokenizer is not None:
            _save(self._options.tokenizer, self._directory)
        _copy_companions(self._model, self._directory)


def _see_who_runs(model: nn.Module, options: ExportOptions) -> None:
    """Say what algorithms that run with the model mean for its readers.

    Raises:
        UnsupportedError: The export is to be a plain float model, which could not say that something runs with it.
    """
    plan: QuantPlan | None = getattr(model, "quark_plan", None)
    names = [a.name for a in (plan.config.algo_config if plan else None) or () if a.runs_with_model()]
    if names and options.weight_format != "real_quantized":
        raise UnsupportedError(
            f"the algorithm {', '.join(names)} runs with this model, which an export of weight_format '{options.weight_format}' cannot "
            "say: take 'real_quantized', or settings that leave all in the weights"
        )
    if names:
        get_logger(__name__).warning(
            f"The algorithm {', '.join(names)} runs with this model: this project and transformers with it load the export; vLLM does not "
            "know such algorithms and would compute something else without a word."
        )


def _save(tokenizer: Tokenizer, directory: Path) -> None:
    try:
        tokenizer.save_pretrained(directory)
    except OSError:
        raise
    except Exception as error:  # whatever the caller's object does
        raise OutputError(
            f"the tokenizer, a {type(tokenizer).__name__}, cannot be saved ({type(error).__name__}: {error}): give another, or none"
        ) from error


def _parts(model: nn.Module, options: ExportOptions, region: Region) -> list[Part]:
    return quantized_parts(model, options, region) if options.weight_format == "real_quantized" else float_parts(model, region)


def _config_of(model: Any, options: ExportOptions | None) -> Any:
    """A copy of the model's config that says how it was quantized; without options, a plain float one."""
    made = copy.deepcopy(model.config)
    made.architectures = made.architectures or [type(model).__name__]
    made.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    if is_tied_apart(model):
        made.tie_word_embeddings = False
    if hasattr(made, "quantization_config"):
        del made.quantization_config
    if options is not None:
        made.quantization_config = quantization_config(model, options)
    return made


def _copy_companions(model: Any, directory: Path) -> None:
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(directory)
    source = Path(getattr(model.config, "_name_or_path", "") or "")
    for name in COMPANIONS:
        if source.name and (source / name).is_file() and not (directory / name).exists():
            shutil.copyfile(source / name, directory / name)
