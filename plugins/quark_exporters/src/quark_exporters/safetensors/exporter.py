"""SafetensorsExporter: a directory in Hugging Face form, built beside its place and moved there when complete."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

from torch import nn

from quark.errors import UnsupportedError
from quark.export.place import building
from quark.export.protocol import ExportOptions
from quark.export.writer import write_shards
from quark_exporters.safetensors.layout import float_parts, is_tied_apart, quantized_parts
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
    "generation_config.json",
)
"""Files that belong to a checkpoint beside its weights; copied from where the model was loaded, if that is a directory."""


class SafetensorsExporter:
    """Writes the Quark layout. Source: spec of the checkpoint format, §1–4 and §10."""

    def export(self, model: nn.Module, out: Path, options: ExportOptions) -> None:
        """As `quark.export.Exporter.export`; ``model`` is a transformers model."""
        config = getattr(model, "config", None)
        if config is None or not hasattr(config, "to_json_file"):
            raise UnsupportedError(
                f"a {type(model).__name__} has no transformers config, without which no reader could rebuild it: only transformers models "
                "can be exported to a checkpoint in Hugging Face form"
            )
        codes = options.weight_format == "real_quantized"
        parts = quantized_parts(model, options) if codes else float_parts(model)
        with building(out) as directory:
            write_shards(parts, directory, options.max_shard_bytes)
            self._config_of(model, config, options if codes else None).to_json_file(directory / "config.json")
            if options.tokenizer is not None:
                options.tokenizer.save_pretrained(directory)
            self._copy_companions(model, config, directory)

    def _config_of(self, model: nn.Module, config: Any, options: ExportOptions | None) -> Any:
        """A copy of the model's config that says how it was quantized; without options, a plain float one."""
        made = copy.deepcopy(config)
        made.architectures = made.architectures or [type(model).__name__]
        made.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        if is_tied_apart(model):
            made.tie_word_embeddings = False
        if hasattr(made, "quantization_config"):
            del made.quantization_config
        if options is not None:
            made.quantization_config = quantization_config(model, options)
        return made

    def _copy_companions(self, model: nn.Module, config: Any, directory: Path) -> None:
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(directory)
        source = Path(getattr(config, "_name_or_path", "") or "")
        for name in COMPANIONS:
            if source.name and (source / name).is_file() and not (directory / name).exists():
                shutil.copyfile(source / name, directory / name)
