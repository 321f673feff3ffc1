"""GgufExporter: writes a model as one GGUF file."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import torch
from torch import nn

from quark.base.log import get_logger
from quark.checkpoint import BlockStream, CheckpointContent, Exporter, ExportOptions, save_companions
from quark.checkpoint.model_tensors import Region, warn_of_left_out
from quark.errors import ConfigError, MissingPluginError, UnsupportedError
from quark.models.plan.decoder_blocks import Block, decoder_blocks
from quark.plugins import OptionNote
from quark_exporters.gguf_layout.metadata import family_of, write_metadata
from quark_exporters.gguf_layout.tensors import FLOAT_TYPES, GgufTensor, TensorWriter
from quark_exporters.gguf_layout.vocabulary import write_vocabulary

if TYPE_CHECKING:
    from gguf import GGUFWriter

__all__ = ["FILE", "GgufExporter"]

FILE = "model.gguf"
"""Default name of the file."""


class GgufExporter(Exporter):
    """Writes a GGUF file with the codes of the model: Q4_0, Q4_1, Q8_0 or MXFP4 weights.

    All other tensors are in floating point.

    Scales are rounded to float16, as these types require; codes do not change. Source: the GGUF
    specification, version 3.

    Args:
        float_type: Type of matrices that are not quantized: f32, f16 or bf16. With ``auto``, types do not
            change.
        tokenizer_pre: llama.cpp's name for the way the tokenizer splits text before it merges tokens. If
            empty, the exporter detects it.
        file_name: Name of the file.
    """

    streams = True

    def __init__(
        self,
        float_type: str = "auto",
        tokenizer_pre: Annotated[str, OptionNote(examples=("llama-bpe", "qwen2"))] = "",
        file_name: str = FILE,
    ) -> None:
        if float_type not in ("auto", *FLOAT_TYPES):
            raise ConfigError(f"float_type is {float_type!r}: use one of auto, {', '.join(FLOAT_TYPES)}")
        if Path(file_name).name != file_name or Path(file_name).suffix != ".gguf":
            raise ConfigError(f"file_name is {file_name!r}: give a name without directories that ends in .gguf, such as '{FILE}'")
        self._file_name = file_name
        self._float_type = float_type
        self._tokenizer_pre = tokenizer_pre

    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        """Implement `quark.checkpoint.Exporter.export`."""
        with self.stream(content, content.model, out, options) as stream:
            for block in decoder_blocks(content.model, content.plan.architecture):
                stream.write(block)
            stream.write(None)
            stream.finish(content)

    def check(self, content: CheckpointContent, skeleton: nn.Module, options: ExportOptions) -> None:
        """Implement `quark.checkpoint.Exporter.check`."""
        tensors = self._tensors(content, options)
        _refuse_algorithms(content)
        tensors.refuse_codes_without_a_type(skeleton)

    def _tensors(self, content: CheckpointContent, options: ExportOptions) -> TensorWriter:
        gguf, config = _gguf(), _text_config(content.model)
        family = family_of(config)
        architecture = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture)
        names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
        return TensorWriter(family, config, names, options.weight_format == "real_quantized", self._float_type)

    @contextmanager
    def stream(self, content: CheckpointContent, skeleton: nn.Module, out: Path, options: ExportOptions) -> Iterator[BlockStream]:
        """Implement `quark.checkpoint.Exporter.stream`."""
        gguf = _gguf()
        self.check(content, skeleton, options)
        _warn_of_activations(content)
        warn_of_left_out(content, "GGUF")
        tensors = self._tensors(content, options)
        config, family = tensors.config, tensors.family
        regions = _regions(content)
        announced = [tensor for region in regions for tensor in tensors.tensors(skeleton, region)]
        writer = gguf.GGUFWriter(None, family.architecture)
        write_metadata(writer, config, family, content.config, _file_type(announced))
        with TemporaryDirectory(prefix="quark-gguf-") as directory:
            save_companions(content.model, Path(directory), options.tokenizer)
            write_vocabulary(writer, Path(directory), config.vocab_size, self._tokenizer_pre or None)
        _announce(writer, announced)
        writer.write_header_to_file(out / self._file_name)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        try:
            yield _Stream(content.model, tensors, iter(regions), writer)
        finally:
            writer.close()


@attrs.frozen(eq=False)
class _Stream(BlockStream):
    """A GGUF file whose header is written already. `write` appends the tensors, region by region."""

    model: nn.Module
    tensors: TensorWriter
    regions: Iterator[Region]
    writer: GGUFWriter

    def write(self, block: Block | None) -> None:
        """Implement `quark.checkpoint.BlockStream.write`."""
        if (region := next(self.regions, None)) is None:
            return  # the model is one block, and its region is written already
        for tensor in self.tensors.tensors(self.model, region):
            values = tensor.make().cpu().contiguous()
            self.writer.write_tensor_data(values.view(torch.uint8).numpy())
            for file in self.writer.fout or ():  # numpy raises no error if a small tensor does not fit on the disk
                file.flush()
                if os.fstat(file.fileno()).st_size < file.tell():
                    raise OSError(
                        errno.ENOSPC, f"the tensor '{tensor.name}' could not be written completely: check the free space", file.name
                    )

    def finish(self, content: CheckpointContent) -> None:
        """Implement `quark.checkpoint.BlockStream.finish`. Nothing is left to write."""


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise MissingPluginError("the GGUF exporter needs the package gguf: pip install 'quark-exporters[gguf]'") from error
    return gguf


def _text_config(model: Any) -> Any:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise UnsupportedError(f"the GGUF exporter needs a transformers model, not a {type(model).__name__}: use another exporter")
    return config.get_text_config()


def _regions(content: CheckpointContent) -> list[Region]:
    """Return the parts of the model in the order in which they are written.

    The decoder blocks come first. The tensors outside the blocks follow.
    """
    names = tuple(block.name for block in decoder_blocks(content.model, content.plan.architecture))
    return [Region()] if names == ("",) else [*map(Region, names), Region(without=names)]


def _refuse_algorithms(content: CheckpointContent) -> None:
    if names := content.config.run_time_algorithms:
        raise UnsupportedError(
            f"the algorithm {', '.join(names)} runs with this model, but llama.cpp does not know it: leave the algorithm out, or export "
            f"as safetensors"
        )


def _warn_of_activations(content: CheckpointContent) -> None:
    layers = [row.config for row in content.plan.quantized if row.config is not None]
    if any(layer.input_tensors is not None or layer.output_tensors is not None for layer in layers) or content.plan.attentions:
        get_logger(__name__).warning(
            "GGUF stores only weights, so the file does not say how activations and the KV cache of this model are quantized. llama.cpp "
            "rounds them in its own way."
        )


def _file_type(tensors: list[GgufTensor]) -> int:
    """Return the `gguf.LlamaFileType` of the type that most quantized weights have."""
    from gguf import LlamaFileType

    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if len(tensor.shape) > 1:
            sizes[tensor.block.file_type if tensor.block else {"F32": "ALL_F32"}.get(tensor.kind, f"MOSTLY_{tensor.kind}")] += torch.Size(
                tensor.shape
            ).numel()
    quantized = [name for name in sizes if name not in ("ALL_F32", "MOSTLY_F16", "MOSTLY_BF16")]
    return int(LlamaFileType[max(quantized or sizes, key=lambda name: sizes[name])])


def _announce(writer: GGUFWriter, tensors: list[GgufTensor]) -> None:
    import numpy
    from gguf import GGMLQuantizationType

    for tensor in tensors:
        writer.add_tensor_info(
            tensor.name, tensor.shape, numpy.dtype(numpy.float32), tensor.nbytes, raw_dtype=GGMLQuantizationType[tensor.kind]
        )
